// Every call along the run, and how far the two sides are apart there.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { FLAG, PHASES, Report, Severity, SEVERITIES } from "./data";
import { h, number } from "./dom";
import { currentLanguage, t, tOf } from "./words";

const FLOOR = -1.6; // where equal ones are drawn, on an axis of powers of ten
const LEAST = 0.05;
const SERIES: Severity[] = ["equal", "rounding", "inherited", "own", "one-sided", "follows", "culprit"];
const SIZE: Record<Severity, number> = { equal: 4, rounding: 4, inherited: 5, own: 7, "one-sided": 6, follows: 8, culprit: 13 };
const HEIGHT = 280;
const SHAPED: Severity[] = ["own", "culprit"]; // drawn here: not by their colour alone are they known

interface Stretch { from: number; to: number; step: number; rank: number; phase: number }

const colour = (variable: string): string => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

export class Timeline {
  readonly element: HTMLElement;
  private plot: uPlot | null = null;
  private readonly calls: Int32Array; // those that have none inside them
  private readonly y: Float64Array;
  private readonly group: Uint8Array;
  private readonly top: number;
  private readonly stretches: Stretch[] = [];
  private readonly tip = h("div", { class: "tip", hidden: true });
  private readonly box = h("div", { class: "plot" });
  private range: [number, number];
  private shown: Int32Array[] = [];
  private pending = false;
  private selected = -1;
  frames: number[] = []; // milliseconds of script that each zoom or pan took

  constructor(private readonly report: Report, private readonly open: (i: number) => void, private readonly brushed: (range: [number, number] | null) => void) {
    const calls: number[] = [];
    for (let i = 0; i < report.n; i++) if (!(report.flags[i] & FLAG.container)) calls.push(i);
    this.calls = Int32Array.from(calls.length ? calls : Array.from({ length: report.n }, (_, i) => i));
    const n = this.calls.length;
    this.y = new Float64Array(n);
    this.group = new Uint8Array(n);
    let highest = 2;
    for (let k = 0; k < n; k++) {
      const out = Math.max(report.errorOut[this.calls[k]], 0);
      if (Number.isFinite(out) && out > 0) highest = Math.max(highest, Math.log10(out));
    }
    this.top = Math.ceil(highest) + 1;
    for (let k = 0; k < n; k++) {
      const i = this.calls[k], out = report.errorOut[i];
      this.y[k] = out === Infinity ? this.top : out > 0 ? Math.log10(Math.max(out, LEAST)) : FLOOR;
      this.group[k] = SERIES.indexOf(report.severityOf(i));
      const last = this.stretches[this.stretches.length - 1];
      const step = report.step[i], rank = report.rank[i], phase = report.phase[i];
      if (last && last.step === step && last.rank === rank && last.phase === phase) last.to = k;
      else this.stretches.push({ from: k, to: k, step, rank, phase });
    }
    this.range = [-0.5, Math.max(n - 0.5, 0.5)];
    const button = (word: "zoomIn" | "zoomOut" | "resetZoom", sign: string, act: () => void) =>
      h("button", { "aria-label": t(word), title: t(word), click: act }, sign);
    this.box.append(this.tip);
    this.element = h("section", { id: "timeline", "aria-labelledby": "timeline-title" },
      h("h2", { id: "timeline-title" }, t("timeline")),
      h("p", { class: "sub" }, t("timelineHelp")),
      h("div", { class: "legend" }, ...[...SERIES].reverse().filter((kind) => this.group.includes(SERIES.indexOf(kind))).map((kind) =>
        h("span", {}, h("i", { class: `dot ${kind}`, "aria-hidden": "true" }), ` ${tOf("sev_", kind)}`)),
        this.calls.some((i) => (report.flags[i] & (FLAG.nonfiniteActual | FLAG.nonfiniteExpected)) !== 0) ? h("span", {}, "× ", t("nonfiniteMark")) : null,
        h("span", { class: "buttons" }, button("zoomIn", "+", () => this.zoom(0.5)), button("zoomOut", "−", () => this.zoom(2)), button("resetZoom", "⤢", () => this.all()))),
      this.box);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", this.inWords());
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  private inWords(): string {
    const counts = SEVERITIES.map((kind) => [kind, this.group.filter((g) => g === SERIES.indexOf(kind)).length] as const).filter(([, n]) => n);
    return `${t("timeline")}: ${counts.map(([kind, n]) => `${n} ${tOf("sev_", kind)}`).join(", ")}`;
  }

  private resize(): void {
    const width = Math.max(320, this.box.clientWidth);
    if (this.plot === null) this.make(width);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  redraw(): void {
    this.plot?.destroy();
    this.plot = null;
    this.resize();
  }

  private make(width: number): void {
    const ink = colour("--ink-2"), grid = colour("--line");
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const from = (kind: Severity): uPlot.Series => ({
      label: kind, scale: "y", stroke: colour(`--${kind}`), fill: colour(`--${kind}`), paths: () => null,
      points: { show: !SHAPED.includes(kind), size: SIZE[kind], width: 0, fill: colour(`--${kind}`), stroke: colour(`--${kind}`) },
    });
    const options: uPlot.Options = {
      width, height: HEIGHT, legend: { show: false }, padding: [14, 12, 0, 4],
      cursor: { drag: { x: true, y: false, setScale: false, dist: 6 }, points: { show: false }, y: false, focus: { prox: 30 } },
      scales: {
        x: { time: false, range: () => this.range },
        y: { range: () => [FLOOR - 0.5, this.top + 0.14 * (this.top - FLOOR)] }, // names of phases are above
      },
      axes: [
        { ...axis, size: 34, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) && this.calls[tick] !== undefined ? String(this.calls[tick]) : "")) },
        { ...axis, size: 62, splits: () => this.splits(), values: (_, ticks) => ticks.map((tick) => this.tick(tick)), label: t("errorAxis"), labelSize: 16, labelFont: "12px system-ui, sans-serif" },
      ],
      series: [{}, ...SERIES.map(from)],
      hooks: {
        drawClear: [(u) => this.bands(u)],
        draw: [(u) => this.marks(u)],
        setCursor: [(u) => this.hover(u)],
        setSelect: [(u) => this.brush(u)],
        ready: [(u) => this.listen(u)],
      },
    };
    this.plot = new uPlot(options, this.data(width), this.box);
  }

  private splits(): number[] {
    const found = [FLOOR, 0];
    const every = this.top > 9 ? 2 : 1;
    for (let power = every; power < this.top; power += every) found.push(power);
    found.push(this.top);
    return found;
  }

  private tick(at: number): string {
    if (at === FLOOR) return t("equalBits");
    if (at === this.top) return "NaN/∞";
    return number(10 ** at);
  }

  /** What is drawn of the calls in sight: of each pixel and kind the one with the largest error. */
  private data(width: number): uPlot.AlignedData {
    const [low, high] = this.range;
    const from = Math.max(0, Math.ceil(low)), to = Math.min(this.calls.length - 1, Math.floor(high));
    const columns = Math.max(50, Math.floor(width / 2));
    const n = to - from + 1;
    const chosen: number[] = [];
    if (n <= columns * 2) for (let k = from; k <= to; k++) chosen.push(k);
    else {
      const kinds = SERIES.length;
      const best = new Int32Array(kinds);
      const size = n / columns;
      let k = from;
      for (let column = 0; column < columns; column++) {
        const end = Math.min(to + 1, Math.round(from + (column + 1) * size));
        best.fill(-1);
        for (; k < end; k++) {
          const g = this.group[k];
          if (best[g] < 0 || this.y[k] > this.y[best[g]]) best[g] = k;
        }
        const found = Array.from(best).filter((each) => each >= 0).sort((a, b) => a - b);
        chosen.push(...found);
      }
    }
    const x = new Float64Array(chosen.length);
    const series: (number | null)[][] = SERIES.map(() => new Array<number | null>(chosen.length).fill(null));
    this.shown = [Int32Array.from(chosen)];
    chosen.forEach((k, at) => {
      x[at] = k;
      series[this.group[k]][at] = this.y[k];
    });
    return [x, ...series] as uPlot.AlignedData;
  }

  private bands(u: uPlot): void {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const tints = [colour("--band-0"), colour("--band-1"), colour("--band-2"), colour("--band-3")];
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    let free = -Infinity;
    for (const each of this.stretches) {
      if (each.to < this.range[0] || each.from > this.range[1]) continue;
      const left = u.valToPos(each.from - 0.5, "x", true), right = u.valToPos(each.to + 0.5, "x", true);
      ctx.fillStyle = tints[each.phase];
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      const text = `${this.placeWords(each)}${tOf("phase_", String(each.phase))}`;
      const at = Math.max(left, bbox.left) + 4 * devicePixelRatio;
      const wide = ctx.measureText(text).width;
      if (at > free && at + wide < Math.max(right, at + 1)) {
        ctx.fillStyle = colour("--ink-3");
        ctx.fillText(text, at, bbox.top + 3 * devicePixelRatio);
        free = at + wide;
      }
    }
    this.ranks(u);
    const y = u.valToPos(Math.log10(16), "y", true); // more than rounding explains
    ctx.strokeStyle = colour("--ink-3");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  /** Of several ranks, which stand one after the other: where each begins. */
  private ranks(u: uPlot): void {
    const { ctx, bbox } = u;
    const starts = this.stretches.filter((each, at) => at === 0 || each.rank !== this.stretches[at - 1].rank);
    if (starts.length < 2) return;
    ctx.strokeStyle = ctx.fillStyle = colour("--ink-3");
    ctx.font = `bold ${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle"; // where no points are: between "equal" and one rounding
    ctx.lineWidth = devicePixelRatio;
    let free = -Infinity;
    for (const each of starts) {
      const left = u.valToPos(each.from - 0.5, "x", true);
      if (left > bbox.left + bbox.width) break;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      const next = starts[starts.indexOf(each) + 1];
      const right = next ? u.valToPos(next.from - 0.5, "x", true) : bbox.left + bbox.width;
      const text = `${t("rank")} ${each.rank}`, at = Math.max(left, bbox.left) + 4 * devicePixelRatio;
      const end = at + ctx.measureText(text).width;
      if (at < free || end > right) continue;
      ctx.fillText(text, at, u.valToPos(FLOOR / 2, "y", true));
      free = end;
    }
    ctx.textBaseline = "top";
  }

  private placeWords(each: Stretch): string {
    const first = this.stretches[0];
    const rank = this.stretches.some((other) => other.rank !== first.rank) ? `${t("rank")} ${each.rank} · ` : "";
    return this.stretches.some((other) => other.step !== first.step) ? `${rank}${t("step")} ${each.step} · ` : rank;
  }

  private marks(u: uPlot): void {
    const { ctx } = u;
    ctx.save();
    ctx.font = `bold ${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    const d = devicePixelRatio;
    this.shapes(u, d);
    this.crosses(u, d);
    let named = 0;
    for (let k = Math.max(0, Math.ceil(this.range[0])); k <= Math.min(this.calls.length - 1, this.range[1]); k++) {
      const i = this.calls[k];
      const isCulprit = this.report.severityOf(i) === "culprit", isSelected = i === this.selected;
      if (!isCulprit && !isSelected) continue;
      const x = u.valToPos(k, "x", true), y = u.valToPos(this.y[k], "y", true);
      ctx.strokeStyle = isCulprit ? colour("--culprit") : colour("--ink");
      ctx.lineWidth = (isSelected ? 2 : 1.2) * d;
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
      if (isSelected) {
        ctx.beginPath();
        ctx.arc(x, y, 9 * d, 0, 7);
        ctx.stroke();
      }
      if (isCulprit && named < 3) {
        const text = `▲ ${named === 0 ? `${t("firstDivergence")}: ` : ""}${cut(this.report.nameOf(i), 44)}`;
        const wide = ctx.measureText(text).width;
        ctx.textBaseline = "bottom";
        const right = x + 10 * d + wide < u.bbox.left + u.bbox.width;
        const isHigh = y - 26 * d < u.bbox.top + 16 * d; // below it, then: above are the names of phases
        const at = right ? x + 10 * d : Math.max(u.bbox.left, x - 10 * d - wide), height = isHigh ? y + 30 * d : y - 9 * d;
        ctx.fillStyle = colour("--paper");
        ctx.globalAlpha = 0.85;
        ctx.fillRect(at - 3 * d, height - 15 * d, wide + 6 * d, 17 * d);
        ctx.globalAlpha = 1;
        ctx.fillStyle = colour("--culprit-ink");
        ctx.fillText(text, at, height);
        named++;
      }
    }
    ctx.restore();
  }

  /** Culprits as triangles, calls that add an error as diamonds: as the legend has them. */
  private shapes(u: uPlot, d: number): void {
    const { ctx } = u;
    for (const kind of SHAPED) {
      const size = (SIZE[kind] / 2 + 1) * d;
      ctx.fillStyle = colour(`--${kind}`);
      ctx.beginPath();
      for (const k of this.shown[0] ?? []) {
        if (SERIES[this.group[k]] !== kind) continue;
        const x = u.valToPos(k, "x", true), y = u.valToPos(this.y[k], "y", true);
        ctx.moveTo(x, y - size);
        ctx.lineTo(x + size, kind === "culprit" ? y + size : y);
        if (kind === "own") ctx.lineTo(x, y + size);
        ctx.lineTo(x - size, kind === "culprit" ? y + size : y);
        ctx.closePath();
      }
      ctx.fill();
    }
  }

  /** Over each call that gives NaN or infinity, on either side. */
  private crosses(u: uPlot, d: number): void {
    const { ctx } = u;
    ctx.strokeStyle = colour("--ink");
    ctx.lineWidth = 1.2 * d;
    ctx.beginPath();
    let free = -Infinity;
    for (const k of this.shown[0] ?? []) {
      if (!(this.report.flags[this.calls[k]] & (FLAG.nonfiniteActual | FLAG.nonfiniteExpected))) continue;
      const x = u.valToPos(k, "x", true), y = u.valToPos(this.y[k], "y", true) - 8 * d;
      if (x < free) continue; // beside each other they would be a bar
      free = x + 9 * d;
      ctx.moveTo(x - 3 * d, y - 3 * d);
      ctx.lineTo(x + 3 * d, y + 3 * d);
      ctx.moveTo(x + 3 * d, y - 3 * d);
      ctx.lineTo(x - 3 * d, y + 3 * d);
    }
    ctx.stroke();
  }

  private nearest(u: uPlot): number {
    const { left, top } = u.cursor;
    if (left === undefined || top === undefined || left < 0) return -1;
    let best = -1, least = Infinity;
    for (const k of this.shown[0] ?? []) {
      const dx = u.valToPos(k, "x") - left, dy = u.valToPos(this.y[k], "y") - top;
      const away = dx * dx + dy * dy;
      if (away < least) { least = away; best = k; }
    }
    return least < 900 ? best : -1;
  }

  private hover(u: uPlot): void {
    const k = this.nearest(u);
    this.tip.hidden = k < 0;
    if (k < 0) return;
    const i = this.calls[k], r = this.report;
    this.tip.replaceChildren(
      h("strong", {}, h("bdi", {}, r.nameOf(i))), h("div", {}, h("bdi", {}, r.moduleOf(i))),
      h("div", {}, `${tOf("sev_", r.severityOf(i))} · ${t("c_in")} ${number(r.errorIn[i])} · ${t("c_out")} ${number(r.errorOut[i])}`),
      h("div", {}, `${t("step")} ${r.step[i]}, ${t("rank")} ${r.rank[i]} · ${tOf("phase_", String(r.phase[i]))}`));
    const x = (u.cursor.left ?? 0) + u.bbox.left / devicePixelRatio;
    this.tip.style.left = `${Math.min(x + 14, this.box.clientWidth - 330)}px`;
    this.tip.style.top = `${(u.cursor.top ?? 0) + 20}px`;
  }

  private brush(u: uPlot): void {
    if (u.select.width < 4) return;
    const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.to(low, high);
  }

  private listen(u: uPlot): void {
    let panning: { x: number; range: [number, number] } | null = null;
    let down = 0;
    u.over.addEventListener("mousedown", (event) => {
      down = event.clientX;
      if (!event.shiftKey) return;
      panning = { x: event.clientX, range: [...this.range] };
      event.stopImmediatePropagation();
      event.preventDefault();
    }, true);
    u.over.addEventListener("mousemove", (event) => {
      if (panning === null) return;
      const by = ((panning.x - event.clientX) / u.over.clientWidth) * (panning.range[1] - panning.range[0]);
      this.to(panning.range[0] + by, panning.range[1] + by);
    });
    window.addEventListener("mouseup", () => { panning = null; });
    u.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - down) > 4) return;
      const k = this.nearest(u);
      if (k >= 0) this.open(this.calls[k]);
    });
    u.over.addEventListener("dblclick", () => this.all());
    u.over.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = u.posToVal(event.offsetX, "x");
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 500);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
    }, { passive: false });
  }

  zoom(factor: number, at = (this.range[0] + this.range[1]) / 2): void {
    this.to(at - (at - this.range[0]) * factor, at + (this.range[1] - at) * factor);
  }

  pan(share: number): void {
    const by = (this.range[1] - this.range[0]) * share;
    this.to(this.range[0] + by, this.range[1] + by);
  }

  all(): void { this.to(-Infinity, Infinity); }

  private to(low: number, high: number): void {
    const end = Math.max(this.calls.length - 0.5, 0.5);
    const wide = Math.min(end + 0.5, Math.max(high - low, 4));
    low = Math.max(-0.5, Math.min(low, end - wide));
    high = Math.min(end, low + wide);
    this.range = [low, high];
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      const start = performance.now();
      this.plot?.setData(this.data(this.plot.width), true);
      // uPlot draws in a microtask of its own, which is before this one
      queueMicrotask(() => {
        this.frames.push(performance.now() - start);
        if (this.frames.length > 500) this.frames.shift();
      });
      clearTimeout(this.telling);
      this.telling = window.setTimeout(() => this.tell(), 120);
    });
  }

  private telling = 0;

  private tell(): void {
    const everything = this.range[0] <= -0.5 && this.range[1] >= this.calls.length - 0.5;
    const from = this.calls[Math.max(0, Math.ceil(this.range[0]))], to = this.calls[Math.min(this.calls.length - 1, Math.floor(this.range[1]))];
    this.brushed(everything || from === undefined || to === undefined ? null : [from, to]);
  }

  select(i: number): void {
    this.selected = i;
    this.plot?.redraw(false);
  }

  private key(event: KeyboardEvent): void {
    const acts: Record<string, () => void> = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.all(), Home: () => this.all(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  }
}

export function cut(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

export const phaseWord = (phase: number): string => (currentLanguage() === "en" ? PHASES[phase] : tOf("phase_", String(phase)));
