// A page of an answer, tables and curves: what Python says of ranks, checkpoints, environments, stages, trends.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { command } from "./commands";
import { bytes, Source } from "./data";
import { exact, h, name, number, said, whole } from "./dom";
import { plainTable } from "./table";
import { sourceLines } from "./verdict";
import { has, sentence, t, Word } from "./words";

type Cell = string | number | null | { text: string };
export interface Curve { name: string; steps: string; values: string[]; marks: [number, string][]; log: boolean }
interface Part { title: string; head?: string[]; right?: number[]; rows?: Cell[][]; more?: number; source?: Source; curves?: Curve[]; sides?: string[] }
interface Sheet {
  outcome: "match" | "diverged" | "incomparable"; badge: string; answer: string; about: string[]; facts: string[];
  commands: string[]; parts: Part[]; notes: string[];
}

const SIGNS = { match: "✓", diverged: "✗", incomparable: "?" };
const HIGH = 190;

export function sheetPage(sheet: Sheet): HTMLElement[] {
  const section = h("section", { id: "verdict", class: `verdict ${sheet.outcome}` },
    h("h1", { id: "answer" }, h("span", { class: "badge" }, h("span", { "aria-hidden": "true" }, `${SIGNS[sheet.outcome]} `), sentence(sheet.badge)), " ", said(sheet.answer)),
    ...sheet.about.map((each) => h("p", { class: "where" }, said(each))),
    ...sheet.facts.map((each) => h("p", { class: "sub" }, said(each))));
  if (sheet.commands.length) section.append(h("div", { class: "next" }, h("h2", {}, t("next")), ...sheet.commands.map((each) => command(each))));
  if (sheet.notes.length) section.append(h("div", { class: "note warn" }, h("strong", {}, t("notes")), h("ul", {}, ...sheet.notes.map((each) => h("li", {}, said(each))))));
  return [section, ...sheet.parts.map(part)];
}

function part(each: Part): HTMLElement {
  const title = sentence(each.title);
  const section = h("section", {}, h("h2", {}, title));
  if (each.source) section.append(sourceLines(each.source));
  if (each.rows) {
    const right = each.right ?? [];
    section.append(plainTable((each.head ?? []).map((word) => (has(`h_${word}`) ? t(`h_${word}` as Word) : sentence(word))), each.rows.map((row) => row.map(shown)), right, title));
    if (each.more) section.append(h("p", { class: "sub" }, t("andMore", { n: whole(each.more) })));
  }
  if (each.curves) {
    const sides = each.sides ?? [];
    section.append(h("p", { class: "sub" }, t("curvesHelp")));
    if (sides.length > 1) section.append(h("div", { class: "legend" }, ...sides.map((side, at) => h("span", {}, h("i", { class: `line-key side-${at}`, "aria-hidden": "true" }), " ", name(side)))));
    section.append(h("div", { class: "curves" }, ...each.curves.map((curve) => drawn(curve, sides))));
  }
  return section;
}

function shown(cell: Cell): Node | string {
  if (cell === null) return "";
  if (typeof cell === "number") return Number.isInteger(cell) ? whole(cell) : number(cell);
  return typeof cell === "string" ? name(cell) : said(cell.text);
}

const colour = (variable: string): string => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/** A curve, drawn when it has a place; and what it says in words. */
function drawn(curve: Curve, sides: string[]): HTMLElement {
  const steps = new Float64Array(bytes(curve.steps).buffer);
  const series = curve.values.map((values) => new Float64Array(bytes(values).buffer));
  const last = series.map((values, at) => `${sides.length > 1 ? `${sides[at]} ` : ""}${exact(values[values.length - 1])}`).join(", ");
  const marks = curve.marks.map(([step, why]) => `${t("step")} ${step}: ${sentence(why)}`);
  const box = h("div", { class: "curve", role: "img", "aria-label": `${curve.name}: ${last}${marks.length ? `; ${marks.join("; ")}` : ""}` });
  const figure = h("figure", {}, h("figcaption", {}, name(curve.name), h("span", { class: "sub" }, ` ${t("lastValue")}: ${last}`)), box,
    ...curve.marks.map(([step, why]) => h("p", { class: "sub" }, `${t("step")} ${step}: `, said(why))));
  const log = curve.log;
  let plot: uPlot | null = null;
  const make = (): void => {
    plot?.destroy();
    const ink = colour("--ink-2"), grid = colour("--line");
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const tints = ["--culprit", "--rounding"];
    plot = new uPlot({
      width: Math.max(240, box.clientWidth), height: HIGH, legend: { show: false }, cursor: { y: false, points: { show: false } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 34 }, { ...axis, size: 66, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
      series: [{}, ...series.map((_, at) => ({ stroke: colour(tints[series.length > 1 ? at : 1]), width: 1.8, dash: at === 1 ? [7, 4] : [], points: { show: steps.length < 40 }, spanGaps: false }))],
      hooks: {
        draw: [(u) => {
          const { ctx, bbox } = u;
          ctx.save();
          ctx.strokeStyle = colour("--culprit");
          ctx.lineWidth = 1.5 * devicePixelRatio;
          ctx.setLineDash([5, 4]);
          for (const [step] of curve.marks) {
            const x = u.valToPos(step, "x", true);
            if (x < bbox.left || x > bbox.left + bbox.width) continue;
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
          }
          ctx.restore();
        }],
      },
    }, [steps, ...series.map((values) => Array.from(values, (value) => (Number.isFinite(value) && !(log && value <= 0) ? value : null)))] as uPlot.AlignedData, box);
  };
  let wide = 0;
  new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== wide) { wide = box.clientWidth; make(); } }).observe(box);
  new MutationObserver(() => { if (box.isConnected && plot) make(); }).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => { if (box.isConnected && plot) make(); });
  return figure;
}
