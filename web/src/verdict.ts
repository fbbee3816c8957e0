// The answer: what happened, where, how large, which side, and what to type next.

import { command, program, quote, which } from "./commands";
import { Culprit, MoreOfCulprit, Report, Source } from "./data";
import { h, name, number, said, whole } from "./dom";
import { plainTable } from "./table";
import { has, sentence, t, tOf, Word } from "./words";

export function inWords(culprit: Culprit): string {
  const cause = `cause_${culprit.cause}`;
  if (has(cause)) return t(cause as Word);
  return has(`kind_${culprit.kind}`) ? tOf("kind_", culprit.kind) : t("kind_output");
}

const size = (value: number | string): string => (typeof value === "string" ? (value === "inf" ? "∞" : value) : number(value));

export function verdictSection(report: Report, open: (i: number) => void): HTMLElement {
  const verdict = report.index.verdict!;
  const section = h("section", { id: "verdict", class: `verdict ${verdict.verdict}`, "aria-labelledby": "answer" });
  const sign = { match: "✓", diverged: "✗", incomparable: "?" }[verdict.verdict];
  const first = verdict.culprits[0];
  const badge = h("span", { class: "badge" }, h("span", { "aria-hidden": "true" }, `${sign} `), tOf("", verdict.verdict));
  if (first && verdict.verdict === "diverged") {
    section.append(h("h1", { id: "answer" }, badge, " ", name(first.name, { class: "name culprit-name" }), ": ", inWords(first)));
    section.append(culpritCard(report, first, report.index.culprits?.[0] ?? null, open, true));
    const others = verdict.culprits.slice(1);
    if (first.follows.length) section.append(folded(t("follows", { n: first.follows.length }), first.follows, report, open));
    if (others.length) {
      section.append(h("h2", {}, t("otherCulprits", { n: others.length })));
      others.slice(0, 20).forEach((each, at) => section.append(foldedCulprit(report, each, report.index.culprits?.[at + 1] ?? null, open)));
      if (others.length > 20) section.append(h("p", {}, t("andMore", { n: others.length - 20 }), ": verdict.json"));
    }
  } else {
    // at chosen places "match" promises something else, which the verdict's own words say
    const own = (report.index.text?.[0] ?? "").replace(/^[a-z]+: /, "");
    const words = verdict.verdict !== "match" ? verdict.reason ?? own : verdict.at?.length ? own : t("matchLong");
    section.append(h("h1", { id: "answer" }, badge, " ", said(words)));
    section.append(h("p", { class: "sub" }, t("alignedCalls", { n: whole(verdict.counts.aligned) }), " · ", tOf("by_", verdict.mode)));
  }
  const places = verdict.boundaries ?? [];
  if (places.length) section.append(placesTable(report, open));
  section.append(beside(report));
  return section;
}

/** What was found at the places that the user chose (`compare --at`). */
function placesTable(report: Report, open: (i: number) => void): HTMLElement {
  const places = report.index.verdict!.boundaries!;
  const rows = places.slice(0, 500).map((each) => {
    const at = each.call ? report.find(each.call, each.step, each.rank) : -1;
    const label = name(each.actual);
    const bad = each.status === "beyond" || each.status === "undecided";
    return [at >= 0 ? h("button", { class: "link", click: () => open(at) }, label) : label, name(each.expected), name(each.tensor),
      h("span", { class: bad ? "other" : null }, tOf("status_", each.status)), each.error === null ? "" : size(each.error), each.limit === null ? "" : size(each.limit),
      name([each.row, each.note && sentence(each.note)].filter(Boolean).join(" · "), { class: "text" })];
  });
  return h("details", { class: "follows", open: places.length <= 40 }, h("summary", {}, t("places", { n: whole(places.length) })),
    plainTable([t("actual"), t("expected"), t("t_name"), t("c_status"), t("t_error"), t("limitWord"), ""], rows, [4, 5], t("places", { n: places.length })));
}

function culpritCard(report: Report, culprit: Culprit, more: MoreOfCulprit | null, open: (i: number) => void, isFirst: boolean): HTMLElement {
  const at = report.find(culprit.name, culprit.step, culprit.rank);
  const facts = h("div", { class: "facts" },
    fact(size(culprit.own_error), `${t("ownError")} (${t("roundings")})`, "bad"),
    fact(size(culprit.inherited_error), `${t("inheritedError")} (${t("roundings")})`),
    fact(whole(culprit.affected), t("affected")));
  const left = h("div", { class: "card-left" },
    h("p", { class: `fault ${culprit.side ?? "none"}` }, t(`sideWrong_${culprit.side ?? "none"}` as Word), culprit.side ? ": " : null, culprit.side ? name(sideOf(report, culprit)) : null, " · ",
      h("span", { class: "sub" }, tOf("proof_", culprit.proof), culprit.weak ? ` · ${t("weak")}` : "")),
    h("p", { class: "where" }, `${t("inModule")} `, culprit.module ? name(culprit.module) : t("theProgram"), ", ", name(culprit.op),
      ` · ${t("step")} ${culprit.step}, ${t("rank")} ${culprit.rank}`),
    h("p", { class: "reason" }, said(culprit.reason, { class: "reason-text" })),
    facts,
    at >= 0 ? h("p", {}, h("button", { class: "primary", click: () => open(at) }, t("openCall"))) : null);
  const right = h("div", { class: "card-right" }, more?.line ? h("p", { class: "line" }, name(more.line)) : null, more?.source ? sourceLines(more.source) : null);
  const card = h("div", { class: "card" }, h("div", { class: "card-body" }, left, right));
  if (more) {
    const verdict = report.index.verdict!;
    const next = h("div", { class: "next" }, h(isFirst ? "h2" : "h3", {}, t("next")));
    const found = /tensorprobe (run|repro|show|compare) .*/.exec(more.next);
    const again = /^(.*), and compare$/.exec(found?.[0] ?? ""); // record more, on both sides
    if (again) next.append(h("p", {}, t("recordAgain")), command(again[1].replace("...", `-o OUT ${program(report)}`), t("cmd_run")));
    else next.append(command(found ? found[0] : more.next, tOf("cmd_", found ? found[1] : "")));
    if (culprit.cause === "result" && culprit.op.startsWith("torch.") && at >= 0)
      next.append(command(`tensorprobe run --reroute ${quote(culprit.name.replace(/\.(forward|backward)$/, ""))}=cpu ${program(report)}`, t("cmd_reroute")));
    if (isFirst && verdict.mode === "tensors" && found?.[1] !== "show") next.append(command(`tensorprobe show ${quote(verdict.actual)} ${at >= 0 ? which(report, at) : quote(culprit.name)}`, t("cmd_show")));
    card.append(next);
  }
  return card;
}

const sideOf = (report: Report, culprit: Culprit): string => (culprit.side === "expected" ? report.index.verdict!.expected : report.index.verdict!.actual);

const fact = (value: string, what: string, kind = ""): HTMLElement =>
  h("div", { class: `fact ${kind}` }, h("span", { class: "fact-value" }, value), h("span", { class: "fact-what" }, what));

export function sourceLines(source: Source): HTMLElement {
  return h("pre", { class: "source", tabindex: 0, role: "group", "aria-label": t("source") },
    ...source.lines.map((line, i) => h("span", { class: source.first + i === source.at ? "at" : null },
      h("span", { class: "number" }, String(source.first + i).padStart(5)), ` ${line}\n`)));
}

function folded(title: string, culprits: Culprit[], report: Report, open: (i: number) => void): HTMLElement {
  const rows = culprits.slice(0, 200).map((each) => {
    const at = report.find(each.name, each.step, each.rank);
    const label = name(each.name);
    return [at >= 0 ? h("button", { class: "link", click: () => open(at) }, label) : label, name(each.module), inWords(each), `${each.step}`, `${each.rank}`, size(each.own_error)];
  });
  return h("details", { class: "follows" }, h("summary", {}, title),
    plainTable([t("c_name"), t("c_module"), t("reason"), t("step"), t("rank"), t("ownError")], rows, [3, 4, 5], title));
}

function foldedCulprit(report: Report, culprit: Culprit, more: MoreOfCulprit | null, open: (i: number) => void): HTMLElement {
  const body = h("details", { class: "culprit" }, h("summary", {}, name(culprit.name), `: ${inWords(culprit)} · ${t("step")} ${culprit.step}, ${t("rank")} ${culprit.rank}`));
  body.append(culpritCard(report, culprit, more, open, false));
  if (culprit.follows.length) body.append(folded(t("follows", { n: culprit.follows.length }), culprit.follows, report, open));
  return body;
}

function beside(report: Report): HTMLElement {
  const { index } = report;
  const verdict = index.verdict!;
  const found = h("div", { class: "beside" });
  const list = (title: string, items: string[], kind: string) => {
    if (items.length) found.append(h("div", { class: `note ${kind}` }, h("strong", {}, title), h("ul", {}, ...items.map((each) => h("li", {}, said(each))))));
  };
  list(t("notes"), verdict.notes, "warn");
  list(t("facts"), verdict.facts, "warn");
  const moves = (index.moves ?? []).filter((each) => each.can);
  if (moves.length) found.append(h("div", { class: "note warn" }, h("strong", {}, t("moves")), h("ul", {},
    ...moves.slice(0, 6).map((each) => h("li", {}, name(each.fact), ": ", t("hereThere", { a: each.actual.slice(0, 80), b: each.expected.slice(0, 80) }), " (", said(each.why), ")"))),
    moves.length > 6 ? h("p", { class: "sub" }, t("andMore", { n: moves.length - 6 })) : null));
  list(t("structure"), index.structure ?? [], "plain");
  if (index.gaps.total) {
    const rows = index.gaps.rows.map(([side, what, why, step, rank]) => [side, name(what), said(why), `${step}`, `${rank}`]);
    found.append(h("details", { class: "note warn" }, h("summary", {}, h("strong", {}, t("gaps")), ": ", t("gapsLong", { n: whole(index.gaps.total) })),
      plainTable(["", t("c_name"), t("reason"), t("step"), t("rank")], rows, [3, 4], t("gaps"))));
  } else found.append(h("p", { class: "sub" }, t("noGaps")));
  return found;
}

export function environmentsSection(report: Report): HTMLElement {
  const { index } = report;
  const two = index.kind === "compare";
  const paths = two ? [["", name(index.verdict!.actual), name(index.verdict!.expected)]] : [["", name(index.path ?? "")]];
  const rows = index.environments.map(([key, ours, theirs]) => (two
    ? [key, name(ours, { class: "text" }), name(theirs, { class: ours === theirs ? "text" : "text other" })]
    : [key, name(ours, { class: "text" })]));
  rows.push(...(index.moves ?? []).map((each) => [name(each.fact), name(each.actual, { class: "text" }), name(each.expected, { class: "text other" })]));
  return h("details", { class: "environments", id: "environments" }, h("summary", {}, h("h2", {}, t(two ? "environments" : "run"))),
    plainTable(two ? ["", t("actual"), t("expected")] : ["", ""], [...paths, ...rows], [], t("environments")));
}
