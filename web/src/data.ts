// The data of a page: columns of numbers, decoded once.

export interface Culprit {
  name: string; cause: string; kind: string; direction: string; step: number; rank: number; module: string; op: string;
  stack: string[]; reason: string; own_error: number | string; inherited_error: number | string;
  metrics: Record<string, unknown>; affected: number; side: string | null; proof: string; tensor: string | null; weak: boolean;
  expected: { name: string; step: number; rank: number } | null; follows: Culprit[];
}

export interface RankLine {
  rank: number; step: number; verdict: string; aligned: number; only_actual: number; only_expected: number; diverged: number;
  culprit: string | null;
}

export interface Received { rank: number; step: number; name: string; through: string; origin: number }

export interface MeasuredPlace {
  actual: string; expected: string; tensor: string; kind: string; call: string | null; step: number; rank: number;
  error: number | string | null; limit: number | string | null; status: string; row: string | null; note: string | null;
}

export interface Verdict {
  verdict: "match" | "diverged" | "incomparable"; actual: string; expected: string; mode: string; counts: Record<string, number>;
  culprits: Culprit[]; reason: string | null; notes: string[]; facts: string[]; ranks: RankLine[]; received?: Received[]; imports: string[];
  at?: string[]; boundaries?: MeasuredPlace[];
}

export interface Source { first: number; at: number; lines: string[] }
export interface MoreOfCulprit { line: string; next: string; source: Source | null }

export interface Picture {
  tensor: string; problem?: string; shape: number[]; steps: number[] | null;
  histogram: { low: number; high: number; counts: (number[] | null)[] } | null;
  errors?: { equal: number; low?: number; high?: number; counts?: number[] };
  worst?: [number[], number | string, number | string][];
  disagree?: number;
  maps?: { top: number; decades: number; shape: number[]; folded: number; of: Record<string, [number, number, string]> } | null;
}

export interface Links { call: string; link: string; names: [string, string, number, number][] }

export interface Index {
  format: number; kind: string; tool: string; verdict?: Verdict; text?: string[]; path?: string; culprits?: MoreOfCulprit[];
  structure?: string[]; environments: string[][]; gaps: { total: number; rows: [string, string, string, number, number][] };
  kept: string[]; calls: Record<string, string>; n: number; strings: string[]; edges: Record<string, string>;
  moves?: { fact: string; actual: string; expected: string; can: boolean; why: string }[]; program?: string; links?: Links; chinese?: Record<string, string>; pictures: Record<string, Picture[]>; lacks?: boolean; of?: number; out?: string;
}

export interface Details {
  strings: string[]; stacks: number[][]; calls: Record<string, string>; tensors: Record<string, string>; values: string;
}

export interface TensorLine {
  name: string; role: string; actual: string; expected: string; error: number; flags: number;
  statistics: [number[], number[]] | null; metrics: number[] | null;
}

export interface CallDetails {
  stack: string[]; arguments: string[]; expected: string[]; notes: string[]; tensors: TensorLine[];
}

export const FLAG = {
  nonfiniteActual: 1, nonfiniteExpected: 2, dtype: 4, shape: 8, args: 16, container: 32, nonfinite: 64, unfinished: 128, differs: 256,
};
export const BOTH = 0, ONLY_ACTUAL = 1, ONLY_EXPECTED = 2;
export const PHASES = ["set-up", "forward", "backward", "optimizer"] as const;
const ROLES = ["input", "output", "parameter", "parameter_grad", "buffer", "state"];
const N_STATISTICS = 7, N_METRICS = 10;
export const ROUNDING = 16; // beyond it, more than rounding explains

export function bytes(text: string): Uint8Array<ArrayBuffer> {
  const raw = atob(text);
  const made = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) made[i] = raw.charCodeAt(i);
  return made;
}

const i32 = (text: string) => new Int32Array(bytes(text).buffer);
const f32 = (text: string) => new Float32Array(bytes(text).buffer);
const f64 = (text: string) => new Float64Array(bytes(text).buffer);
const u16 = (text: string) => new Uint16Array(bytes(text).buffer);

/** How bad a call is: by this it has its colour and its sign. */
export type Severity = "culprit" | "follows" | "own" | "inherited" | "rounding" | "equal" | "one-sided";
export const SEVERITIES: Severity[] = ["culprit", "follows", "own", "inherited", "one-sided", "rounding", "equal"];

export class Report {
  readonly n: number;
  readonly strings: string[];
  readonly name: Int32Array; readonly other: Int32Array; readonly op: Int32Array; readonly module: Int32Array; readonly parent: Int32Array;
  readonly step: Int32Array; readonly rank: Int32Array; readonly phase: Uint8Array; readonly side: Uint8Array; readonly flags: Uint16Array;
  readonly errorIn: Float32Array; readonly errorOut: Float32Array;
  readonly edgeSource: Int32Array; readonly edgeTarget: Int32Array; readonly edgeSide: Uint8Array;
  readonly culpritAt = new Map<number, Culprit>();
  readonly severity: Uint8Array; // places in SEVERITIES
  readonly isComparison: boolean;
  private names: Map<string, number[]> | null = null;
  private source: Promise<DetailSource | null> | undefined; // read when a call is opened
  private communications: Map<number, number[]> | undefined;

  constructor(readonly index: Index, private readonly readDetails: () => Promise<Details | null>, private readonly served: Served | null) {
    const c = index.calls;
    this.n = index.n;
    this.strings = index.strings;
    this.isComparison = index.kind === "compare";
    this.name = i32(c.name); this.other = i32(c.other); this.op = i32(c.op); this.module = i32(c.module); this.parent = i32(c.parent);
    this.step = i32(c.step); this.rank = i32(c.rank); this.phase = bytes(c.phase); this.side = bytes(c.side); this.flags = u16(c.flags);
    this.errorIn = f32(c.error_in); this.errorOut = f32(c.error_out);
    this.edgeSource = i32(index.edges.source); this.edgeTarget = i32(index.edges.target); this.edgeSide = bytes(index.edges.side);
    for (const cause of index.verdict?.culprits ?? [])
      for (const culprit of [cause, ...cause.follows]) {
        const at = this.find(culprit.name, culprit.step, culprit.rank);
        if (at >= 0 && !this.culpritAt.has(at)) this.culpritAt.set(at, culprit);
      }
    this.severity = new Uint8Array(this.n);
    for (let i = 0; i < this.n; i++) this.severity[i] = SEVERITIES.indexOf(this.judge(i));
  }

  private judge(i: number): Severity {
    const culprit = this.culpritAt.get(i);
    if (culprit) return this.index.verdict!.culprits.includes(culprit) ? "culprit" : "follows";
    if (!this.isComparison) return "equal";
    if (this.side[i] !== BOTH) return "one-sided";
    const out = this.errorOut[i], given = this.errorIn[i];
    if (out > ROUNDING) return out > 4 * given && !(this.flags[i] & FLAG.container) ? "own" : "inherited";
    return out > 0 || given > 0 ? "rounding" : "equal";
  }

  severityOf(i: number): Severity { return SEVERITIES[this.severity[i]]; }
  text(number: number): string { return this.strings[number] ?? ""; }
  nameOf(i: number): string { return this.text(this.name[i]); }
  moduleOf(i: number): string { return this.text(this.module[i]); }

  find(name: string, step: number, rank: number): number {
    if (this.names === null) {
      this.names = new Map();
      for (let i = 0; i < this.n; i++) {
        const key = this.text(this.name[i]);
        const places = this.names.get(key);
        if (places) places.push(i);
        else this.names.set(key, [i]);
      }
    }
    for (const i of this.names.get(name) ?? []) if (this.step[i] === step && this.rank[i] === rank) return i;
    return -1;
  }

  /** What is known of one call; null where neither the page nor a server has it. */
  async details(i: number): Promise<CallDetails | null> {
    this.source ??= this.readDetails().then((details) => (details === null ? null : new DetailSource(details)));
    const source = await this.source;
    if (source !== null) return source.get(i);
    if (this.served !== null) return new DetailSource(await this.served.get(`call/${i}`) as Details).get(0);
    return null;
  }

  /** The calls of several ranks that are one communication, by its number. */
  links(): Map<number, number[]> {
    if (this.communications === undefined) {
      this.communications = new Map();
      const links = this.index.links;
      if (links) {
        const calls = i32(links.call), of = i32(links.link);
        for (let k = 0; k < calls.length; k++) {
          const known = this.communications.get(of[k]);
          if (known) known.push(calls[k]);
          else this.communications.set(of[k], [calls[k]]);
        }
      }
    }
    return this.communications;
  }

  async pictures(i: number): Promise<Picture[] | null> {
    const here = this.index.pictures[String(i)];
    if (here) return here;
    if (this.served !== null) return await this.served.get(`pictures/${i}`) as Picture[] | null;
    return null;
  }
}

class DetailSource {
  private first: Int32Array; private stack: Int32Array; private args: Int32Array; private expected: Int32Array; private notes: Int32Array;
  private name: Int32Array; private role: Uint8Array; private value: Int32Array; private actualKind: Int32Array; private expectedKind: Int32Array;
  private error: Float32Array; private flags: Uint8Array; private values: Float64Array;

  constructor(private readonly d: Details) {
    this.first = i32(d.calls.first); this.stack = i32(d.calls.stack); this.args = i32(d.calls.arguments);
    this.expected = i32(d.calls.expected); this.notes = i32(d.calls.notes);
    const t = d.tensors;
    this.name = i32(t.name); this.role = bytes(t.role); this.value = i32(t.value); this.actualKind = i32(t.actual);
    this.expectedKind = i32(t.expected); this.error = f32(t.error); this.flags = bytes(t.flags);
    this.values = f64(d.values);
  }

  get(i: number): CallDetails {
    const tensors: TensorLine[] = [];
    for (let k = this.first[i]; k < this.first[i + 1]; k++) {
      const at = this.value[k] * (2 * N_STATISTICS + N_METRICS);
      const v = this.value[k] < 0 ? null : Array.from(this.values.subarray(at, at + 2 * N_STATISTICS + N_METRICS));
      tensors.push({
        name: this.d.strings[this.name[k]], role: ROLES[this.role[k]], actual: this.d.strings[this.actualKind[k]],
        expected: this.d.strings[this.expectedKind[k]], error: this.error[k], flags: this.flags[k],
        statistics: v === null ? null : [v.slice(0, N_STATISTICS), v.slice(N_STATISTICS, 2 * N_STATISTICS)],
        metrics: v === null || Number.isNaN(v[2 * N_STATISTICS]) ? null : v.slice(2 * N_STATISTICS),
      });
    }
    const lines = (number: number) => (number ? this.d.strings[number].split("\n") : []);
    return {
      stack: this.d.stacks[this.stack[i]].map((frame) => this.d.strings[frame]),
      arguments: lines(this.args[i]), expected: lines(this.expected[i]), notes: lines(this.notes[i]), tensors,
    };
  }
}

/** `tensorprobe view`: what the page asks it for. */
export class Served {
  constructor(private readonly item: number) {}

  async get(what: string): Promise<unknown> {
    const answer = await fetch(`data/${this.item}/${what}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
}

export function block(id: string): any {
  const element = document.getElementById(id);
  return element === null ? null : JSON.parse(element.textContent ?? "null");
}

/** A block that stands behind the script: the page can be used before the browser has read it. */
export async function laterBlock(id: string): Promise<any> {
  if (document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  return block(id);
}
