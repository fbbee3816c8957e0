// One call: where it is, what it was given, how far its two sides are apart, and where in its tensors.

import { command, commandsFor, recordMore, viewCommand } from "./commands";
import { CallDetails, FLAG, Picture, Report, TensorLine } from "./data";
import { announce, copy, exact, h, name, number, said, whole } from "./dom";
import { marksOf, severityBadge } from "./calls";
import { pictureOf } from "./pictures";
import { plainTable } from "./table";
import { sameOnOthers } from "./ranks";
import { sourceLines } from "./verdict";
import { t, tOf, Word } from "./words";

const STATISTICS = ["m_min", "m_max", "m_mean", "m_norm", "m_nan", "m_inf", "m_zero"] as const;

export class CallPanel {
  readonly element = h("aside", { class: "panel", id: "call", "aria-label": t("oneCall"), hidden: true, tabindex: -1 });
  private shown = -1;

  constructor(private readonly report: Report, private readonly go: (i: number) => void, private readonly close: () => void, private readonly reveal: (i: number) => void) {
    this.element.addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
  }

  get current(): number { return this.shown; }

  hide(): void {
    this.shown = -1;
    this.element.hidden = true;
  }

  async show(i: number): Promise<void> {
    this.shown = i;
    const r = this.report;
    const body = h("div", { class: "panel-body" });
    const copyLink = h("button", { click: async () => { if (await copy(location.href)) announce(t("copied")); } }, t("linkToCall"));
    const head = h("div", { class: "panel-head" },
      h("div", { class: "panel-buttons" },
        h("button", { "aria-label": t("previous"), title: t("previous"), disabled: i === 0, click: () => this.go(i - 1) }, "←"),
        h("button", { "aria-label": t("following"), title: t("following"), disabled: i === r.n - 1, click: () => this.go(i + 1) }, "→"),
        h("button", { click: () => this.reveal(i) }, t("graph")), copyLink,
        h("button", { class: "close", "aria-label": t("close"), title: t("close"), click: () => this.close() }, "✕")),
      h("h2", { tabindex: -1 }, name(r.nameOf(i))),
      h("p", {}, r.isComparison ? severityBadge(r.severityOf(i)) : null, " ", ...marksOf(r, i).map((mark) => h("span", { class: "mark" }, mark))),
      h("p", { class: "sub" }, r.moduleOf(i) ? name(r.moduleOf(i)) : t("theProgram"), " · ", name(r.text(r.op[i])), ` · ${t("step")} ${r.step[i]}, ${t("rank")} ${r.rank[i]} · ${tOf("phase_", String(r.phase[i]))}`),
      r.other[i] !== r.name[i] ? h("p", { class: "sub" }, `${t("expected")}: `, name(r.text(r.other[i]))) : null,
      r.isComparison ? h("div", { class: "facts" },
        this.fact(number(r.errorIn[i]), `${t("c_in")} (${t("roundings")})`), this.fact(number(r.errorOut[i]), `${t("c_out")} (${t("roundings")})`)) : null);
    this.element.replaceChildren(head, body);
    this.element.hidden = false;
    this.element.scrollTop = 0;
    (head.querySelector("h2") as HTMLElement).focus({ preventScroll: true });
    this.culprit(i, body);
    let details: CallDetails | null = null;
    try {
      details = await r.details(i);
    } catch (error) {
      body.append(h("p", { class: "note warn" }, String(error)));
    }
    if (this.shown !== i) return;
    await this.pictures(i, body, details);
    if (this.shown !== i) return;
    if (details === null) body.append(h("div", {}, h("p", {}, t("noDetails")), command(viewCommand(r))));
    else {
      this.arguments(details, body);
      this.tensors(details, body);
      this.stack(details, body);
    }
    const others = sameOnOthers(r, i, this.go);
    if (others) body.append(others);
    this.neighbours(i, body);
    body.append(h("h3", {}, t("commands")), ...commandsFor(r, i).map(([what, text]) => command(text, what)));
  }

  private fact(value: string, what: string): HTMLElement {
    return h("div", { class: "fact" }, h("span", { class: "fact-value" }, value), h("span", { class: "fact-what" }, what));
  }

  private culprit(i: number, body: HTMLElement): void {
    const culprit = this.report.culpritAt.get(i);
    if (!culprit) return;
    body.append(h("div", { class: "note bad" }, h("strong", {}, culprit.proof === "replayed" ? `${t("replay")}: ` : ""), said(culprit.reason)));
    const worst = culprit.metrics.worst as { at: number[]; recorded: number | string; replayed: number | string } | undefined;
    if (worst && culprit.side)
      body.append(h("p", { class: "replayed" }, t("replayedWorst", { at: `${culprit.tensor ?? ""}[${worst.at.join(", ")}]`, right: exact(worst.replayed), side: t(culprit.side as Word), wrong: exact(worst.recorded) })));
    const at = this.report.index.verdict!.culprits.indexOf(culprit);
    const source = this.report.index.culprits?.[at]?.source;
    if (source) body.append(h("h3", {}, t("source")), sourceLines(source));
  }

  /** The tensor that a culprit is accused of, then the others. */
  private culpritFirst(i: number, found: Picture[]): Picture[] {
    const accused = this.report.culpritAt.get(i)?.tensor;
    const isIt = (each: Picture): boolean => Boolean(accused) && each.tensor === accused;
    return [...found.filter(isIt), ...found.filter((each) => !isIt(each))];
  }

  private async pictures(i: number, body: HTMLElement, details: CallDetails | null): Promise<void> {
    const r = this.report;
    const place = h("div");
    body.append(place);
    try {
      const found = await r.pictures(i);
      if (this.shown !== i) return;
      if (found?.length) place.append(h("h3", {}, t("pictures")), ...this.culpritFirst(i, found).map(pictureOf));
      else if (details && details.tensors.length && r.index.kept.some((keep) => keep && keep !== "tensors"))
        place.append(h("h3", {}, t("pictures")), h("p", {}, t("onlyStats")), command(recordMore(r, i)));
      else if (found === null && details && details.tensors.some((each) => each.metrics))
        place.append(h("h3", {}, t("pictures")), h("p", {}, t("noPictures")), command(viewCommand(r)));
    } catch (error) {
      place.append(h("p", { class: "note warn" }, String(error)));
    }
  }

  private arguments(details: CallDetails, body: HTMLElement): void {
    body.append(h("h3", {}, t("arguments")));
    const split = (lines: string[]) => new Map(lines.map((line) => { const at = line.indexOf(": "); return [line.slice(0, at), line.slice(at + 2)] as const; }));
    const ours = split(details.arguments), theirs = split(details.expected);
    const keys = [...new Set([...ours.keys(), ...theirs.keys()])];
    if (!keys.length) body.append(h("p", { class: "sub" }, t("noArguments")));
    else {
      const two = this.report.isComparison;
      const rows = keys.map((key) => {
        const a = ours.get(key) ?? "", e = theirs.get(key) ?? "";
        return two ? [name(key), name(a, { class: a === e ? "text" : "text other" }), name(e, { class: a === e ? "text" : "text other" })] : [name(key), name(a, { class: "text" })];
      });
      body.append(plainTable(two ? ["", t("actual"), t("expected")] : ["", ""], rows, [], t("arguments")));
    }
    if (details.notes.length) body.append(h("ul", { class: "sub" }, ...details.notes.map((each) => h("li", {}, name(each, { class: "text" })))));
  }

  private tensors(details: CallDetails, body: HTMLElement): void {
    if (!details.tensors.length) return;
    const two = this.report.isComparison;
    body.append(h("h3", {}, t("tensors")));
    for (const each of details.tensors) {
      const differs = each.flags & (FLAG.dtype | FLAG.shape);
      const box = h("details", { class: "tensor", open: each.role === "output" || each.error > 16 },
        h("summary", {}, name(each.name), " ", name(each.actual || each.expected, { class: "sub" }),
          differs && each.expected ? h("span", { class: "other" }, ` ≠ ${each.expected}`) : null,
          two ? h("span", { class: each.error > 16 ? "away bad" : "away" }, `${t("t_error")} ${number(each.error)}`) : null));
      box.append(this.numbers(each, two));
      body.append(box);
    }
  }

  private numbers(each: TensorLine, two: boolean): HTMLElement {
    if (each.statistics === null) return h("p", { class: "sub" }, t("empty"));
    const [ours, theirs] = each.statistics;
    const head = ["", ...STATISTICS.map((word) => t(word))];
    const row = (title: string, values: number[], other: number[]) => [title, ...values.map((value, at) => h("span", { class: two && value !== other[at] && !(Number.isNaN(value) && Number.isNaN(other[at])) ? "other" : null }, at > 3 ? (Number.isNaN(value) ? "" : whole(value)) : exact(value)))];
    const rows = two ? [row(t("actual"), ours, theirs), row(t("expected"), theirs, ours)] : [row("", ours, ours)];
    const box = h("div", {}, plainTable(head, rows, [1, 2, 3, 4, 5, 6, 7], `${t("statistics")} ${each.name}`));
    const m = each.metrics;
    if (m) {
      const parts = [
        `${t("m_mismatched")} ${whole(m[1])} / ${whole(m[0])}`, `${t("m_cosine")} ${exact(m[2])}`, `${t("m_max_abs")} ${number(m[3])}`,
        `${t("m_max_rel")} ${number(m[4])}`, `${t("m_rel_l2")} ${number(m[5])}`, Number.isNaN(m[6]) ? "" : `${t("m_ulp")} ${number(m[6])}`];
      box.append(h("p", { class: "sub" }, parts.filter(Boolean).join(" · ")));
    }
    return box;
  }

  private stack(details: CallDetails, body: HTMLElement): void {
    body.append(h("h3", {}, t("stack")));
    if (!details.stack.length) body.append(h("p", { class: "sub" }, t("noStack")));
    else body.append(h("ol", { class: "stack" }, ...details.stack.map((frame) => h("li", {}, name(frame)))));
  }

  private neighbours(i: number, body: HTMLElement): void {
    const r = this.report;
    const list = (title: string, mine: Int32Array, theirs: Int32Array) => {
      const found: number[] = [];
      for (let k = 0; k < mine.length && found.length < 12; k++) if (mine[k] === i && !(r.flags[theirs[k]] & FLAG.container)) found.push(theirs[k]);
      if (found.length) body.append(h("h3", {}, title), h("ul", { class: "links" }, ...found.map((at) => h("li", {}, h("i", { class: `dot ${r.severityOf(at)}`, "aria-hidden": "true" }), " ", h("button", { class: "link", click: () => this.go(at) }, name(r.nameOf(at)))))));
    };
    list(t("inputsFrom"), r.edgeTarget, r.edgeSource);
    list(t("outputsTo"), r.edgeSource, r.edgeTarget);
  }
}
