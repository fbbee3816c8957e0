// The table of all calls: filtered and sorted at once.

import { FLAG, ONLY_ACTUAL, ONLY_EXPECTED, Report, SEVERITIES } from "./data";
import { download, h, name, number, whole } from "./dom";
import { Column, VirtualTable } from "./table";
import { t, tOf } from "./words";

export function marksOf(report: Report, i: number): string[] {
  const flags = report.flags[i];
  const found: string[] = [];
  if (flags & (FLAG.nonfiniteActual | FLAG.nonfiniteExpected)) found.push(t("mark_nan"));
  if (flags & FLAG.dtype) found.push(t("mark_dtype"));
  if (flags & FLAG.shape) found.push(t("mark_shape"));
  if (flags & FLAG.args) found.push(t("mark_args"));
  if (flags & FLAG.unfinished) found.push(t("mark_unfinished"));
  if (report.isComparison && report.side[i] === ONLY_ACTUAL) found.push(t("mark_actual"));
  if (report.side[i] === ONLY_EXPECTED) found.push(t("mark_expected"));
  return found;
}

export function severityBadge(kind: string): HTMLElement {
  return h("span", { class: `severity ${kind}` }, h("i", { class: `dot ${kind}`, "aria-hidden": "true" }), ` ${tOf("sev_", kind)}`);
}

const two = (compare: (i: number) => number) => (a: number, b: number) => compare(a) - compare(b);

export class CallsTable {
  readonly element: HTMLElement;
  private readonly table: VirtualTable;
  private readonly input: HTMLInputElement;
  private readonly count = h("span", { class: "count", role: "status" });
  private readonly chip = h("span");
  private readonly phase: HTMLSelectElement;
  private readonly status: HTMLSelectElement;
  private range: [number, number] | null = null;
  private haystack: string[] | null = null;

  constructor(private readonly report: Report, open: (i: number) => void, private readonly unbrush: () => void) {
    const r = report;
    const text = (column: Int32Array): Column["compare"] => (a, b) => (r.text(column[a]) < r.text(column[b]) ? -1 : r.text(column[a]) > r.text(column[b]) ? 1 : 0);
    const error = (column: Float32Array) => (i: number) => (r.isComparison ? number(column[i]) : "");
    const columns: Column[] = [
      { title: t("c_number"), width: "64px", right: true, cell: (i) => String(i), compare: two((i) => i) },
      ...(r.isComparison ? [{ title: t("c_status"), width: "140px", cell: (i: number) => severityBadge(r.severityOf(i)), compare: two((i) => r.severity[i]) }] : []),
      { title: t("c_name"), width: "minmax(180px, 2.4fr)", cell: (i) => name(r.nameOf(i), { title: r.nameOf(i) }), compare: text(r.name) },
      { title: t("c_module"), width: "minmax(120px, 1.6fr)", cell: (i) => name(r.moduleOf(i), { title: r.moduleOf(i) }), compare: text(r.module) },
      { title: t("step"), width: "56px", right: true, cell: (i) => String(r.step[i]), compare: two((i) => r.step[i]) },
      { title: t("rank"), width: "56px", right: true, cell: (i) => String(r.rank[i]), compare: two((i) => r.rank[i]) },
      { title: t("c_phase"), width: "88px", cell: (i) => tOf("phase_", String(r.phase[i])), compare: two((i) => r.phase[i]) },
      ...(r.isComparison ? [
        { title: t("c_in"), width: "92px", right: true, cell: error(r.errorIn), compare: two((i) => r.errorIn[i]) },
        { title: t("c_out"), width: "92px", right: true, cell: error(r.errorOut), compare: two((i) => r.errorOut[i]) },
      ] : []),
      { title: t("c_marks"), width: "minmax(90px, 1fr)", cell: (i) => marksOf(r, i).join(", "), compare: two((i) => r.flags[i] & ~FLAG.container) },
    ];
    this.table = new VirtualTable(columns, t("calls"), open, (i) => r.severityOf(i));
    this.input = h("input", { type: "search", class: "filter", placeholder: t("filter"), "aria-label": t("filter"), input: () => this.filter() });
    const select = (label: string, options: [string, string][]) =>
      h("select", { "aria-label": label, change: () => this.filter() }, h("option", { value: "" }, `${label}: ${t("filterAll")}`), ...options.map(([value, shown]) => h("option", { value }, shown)));
    this.phase = select(t("c_phase"), [0, 1, 2, 3].map((p) => [String(p), tOf("phase_", String(p))]));
    this.status = select(t("c_status"), SEVERITIES.map((kind, at) => [String(at), tOf("sev_", kind)]));
    this.element = h("section", { id: "calls", "aria-labelledby": "calls-title" },
      h("h2", { id: "calls-title" }, t("calls")),
      h("div", { class: "tools" }, this.input, r.isComparison ? this.status : null, this.phase, this.chip, this.count,
        h("button", { click: () => this.export() }, t("exportCsv"))),
      this.table.element);
    this.filter();
  }

  brush(range: [number, number] | null): void {
    this.range = range;
    this.chip.replaceChildren();
    if (range) this.chip.append(h("button", { class: "chip", "aria-label": t("removeFilter"), click: () => this.unbrush() }, t("inTimeline", { a: range[0], b: range[1] }), " ✕"));
    this.filter();
  }

  reveal(i: number): void { this.table.reveal(i); }

  private filter(): void {
    const r = this.report;
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && this.haystack === null) {
      const lower = r.strings.map((each) => each.toLowerCase());
      this.haystack = Array.from({ length: r.n }, (_, i) =>
        `${lower[r.name[i]]} ${lower[r.module[i]]} ${lower[r.op[i]]} ${tOf("sev_", r.severityOf(i)).toLowerCase()} ${marksOf(r, i).join(" ").toLowerCase()}`);
    }
    const [from, to] = this.range ?? [0, r.n - 1];
    const phase = this.phase.value === "" ? -1 : Number(this.phase.value), status = this.status.value === "" ? -1 : Number(this.status.value);
    const found: number[] = [];
    for (let i = from; i <= to && i < r.n; i++) {
      if (phase >= 0 && r.phase[i] !== phase) continue;
      if (status >= 0 && r.severity[i] !== status) continue;
      if (words.length && !words.every((word) => this.haystack![i].includes(word))) continue;
      found.push(i);
    }
    this.table.show(found);
    this.count.textContent = t("rowsShown", { n: whole(found.length), all: whole(r.n) });
  }

  private export(): void {
    const r = this.report;
    const lines = [["index", "status", "call", "module", "op", "step", "rank", "phase", "error_in", "error_out", "marks"]];
    for (const i of this.table.shown)
      lines.push([String(i), r.severityOf(i), r.nameOf(i), r.moduleOf(i), r.text(r.op[i]), String(r.step[i]), String(r.rank[i]),
        ["set-up", "forward", "backward", "optimizer"][r.phase[i]], String(r.errorIn[i]), String(r.errorOut[i]), marksOf(r, i).join(" ")]);
    download("calls.csv", "text/csv", lines.map((line) => line.map(cell).join(",")).join("\n") + "\n");
  }
}

/** A cell that no spreadsheet takes for a formula. */
export function cell(text: string): string {
  const safe = /^[=+\-@\t\r|%]/.test(text) && !/^[+-]?[\d.]+(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.split('"').join('""')}"` : safe;
}
