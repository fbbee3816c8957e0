// Ranks by steps: where a cause begins and where it came in; and the collectives that join ranks.

import { FLAG, Report, SEVERITIES } from "./data";
import { clear, h, name, s, whole } from "./dom";
import { t, tOf } from "./words";

const MOST = 200; // ranks, and steps
const LANES = 128; // ranks that are drawn as lines
const COLUMNS = 60; // collectives that are drawn at once
const WIDE = 34, HIGH = 26, LEFT = 76, TOP = 86;

export function ranksSection(report: Report, open: (i: number) => void): HTMLElement | null {
  const lines = report.index.verdict?.ranks ?? [];
  const ranks = [...new Set(lines.map((line) => line.rank))].sort((a, b) => a - b).slice(0, MOST);
  const steps = new Set(lines.map((line) => line.step));
  for (let i = 0; i < report.n; i++) if (steps.size < MOST) steps.add(report.step[i]);
  const columns = [...steps].sort((a, b) => a - b).slice(0, MOST);
  if (!ranks.length || (ranks.length < 2 && columns.length < 2)) return null;
  const at = new Map(lines.map((line) => [`${line.rank},${line.step}`, line]));
  const received = report.index.verdict?.received ?? [];
  const came = new Map(received.map((each) => [`${each.rank},${each.step}`, each]));
  const cell = (rank: number, step: number): HTMLElement => {
    const line = at.get(`${rank},${step}`);
    const from = came.get(`${rank},${step}`);
    if (!line && !from) return h("td", { class: "later", title: t("notJudged") }, "·");
    const begins = !from && !!line?.culprit;
    const before = begins || from ? undefined : received.find((each) => each.rank === rank && each.step < step);
    if (before && !line!.diverged && line!.verdict === "match") {
      const words = t("receivedBefore", { n: before.origin, step: before.step });
      return h("td", { class: "cell inherited", title: words }, h("span", { "aria-label": words, role: "img" }, "↘"));
    }
    const called = from?.name ?? line?.culprit ?? null;
    const place = called === null ? -1 : report.find(called, step, rank);
    const n = line?.diverged ?? 0;
    const words = [`${t("rank")} ${rank}, ${t("step")} ${step}: ${from ? t("received", { n: from.origin, through: from.through }) : tOf("", line!.verdict)}`, called,
      n ? t("nDiffer", { n: whole(n) }) : null].filter(Boolean).join(", ");
    const kind = begins ? "culprit" : from || n ? "inherited" : line!.verdict === "match" ? "equal" : "one-sided";
    const sign = `${begins ? "▲ " : from ? "↘ " : ""}${n ? whole(n) : begins || from ? "" : line!.verdict === "match" ? "✓" : "?"}`.trim();
    return h("td", { class: `cell ${kind}`, title: words }, place >= 0 ? h("button", { class: "link", "aria-label": words, click: () => open(place) }, sign) : sign);
  };
  return h("section", { id: "ranks", "aria-labelledby": "ranks-title" }, h("h2", { id: "ranks-title" }, t("ranks")), h("p", { class: "sub" }, t("ranksHelp")),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": t("ranks") }, h("table", { class: "matrix" },
      h("thead", {}, h("tr", {}, h("td", {}), ...columns.map((step) => h("th", { scope: "col" }, `${t("step")} ${step}`)))),
      h("tbody", {}, ...ranks.map((rank) => h("tr", {}, h("th", { scope: "row" }, `${t("rank")} ${rank}`), ...columns.map((step) => cell(rank, step))))))),
    ranks.length > 1 ? collectives(report, open) : null);
}

/** The ranks as lines, and what they told each other as columns that join them. */
function collectives(report: Report, open: (i: number) => void): HTMLElement {
  const members = report.links();
  const title = h("h3", {}, t("collectives"));
  const byStep = new Map<number, number[]>();
  const first = (link: number) => members.get(link)!.reduce((a, b) => Math.min(a, b));
  (report.index.links?.names ?? []).forEach((each, link) => {
    if ((members.get(link)?.length ?? 0) < 2) return;
    const known = byStep.get(each[3]);
    if (known) known.push(link);
    else byStep.set(each[3], [link]);
  });
  const steps = [...byStep.keys()].sort((a, b) => a - b);
  if (!steps.length) return h("div", {}, title, h("p", { class: "sub" }, t("noCollectives")));
  const cause = report.index.verdict?.culprits[0];
  const ordered = new Set<number>();
  const inStep = (step: number): number[] => {
    const links = byStep.get(step)!;
    if (!ordered.has(step)) links.sort((a, b) => first(a) - first(b));
    ordered.add(step);
    return links;
  };
  const select = h("select", { "aria-label": t("step"), change: () => { turn(begin(Number(select.value))); } }, ...steps.map((step) => h("option", { value: step }, `${t("step")} ${step}`)));
  if (cause && steps.includes(cause.step)) select.value = String(cause.step);
  const count = h("span", { class: "count", role: "status" });
  const box = h("div", { class: "scroll lanes", tabindex: 0, role: "group", "aria-label": t("collectives") });
  let from = 0;
  /** A little before the first collective that does not agree. */
  const begin = (step: number): number => {
    const bad = inStep(step).findIndex((link) => members.get(link)!.some((i) => report.severity[i] <= SEVERITIES.indexOf("inherited")));
    return Math.max(0, bad - Math.floor(COLUMNS / 4));
  };
  const turn = (to: number): void => {
    const links = inStep(Number(select.value));
    from = Math.max(0, Math.min(to, links.length - 1));
    const shown = links.slice(from, from + COLUMNS);
    count.textContent = t("collectivesShown", { a: from + 1, b: from + shown.length, n: whole(links.length) });
    earlier.disabled = from === 0;
    later.disabled = from + COLUMNS >= links.length;
    clear(box);
    box.append(lanes(report, Number(select.value), shown, from === 0, open));
  };
  const earlier = h("button", { click: () => turn(from - COLUMNS) }, t("earlier"));
  const later = h("button", { click: () => turn(from + COLUMNS) }, t("later"));
  requestAnimationFrame(() => setTimeout(() => turn(begin(Number(select.value))))); // the answer above must not wait for it
  return h("div", { id: "collectives" }, title, h("p", { class: "sub" }, t("collectivesHelp")),
    h("div", { class: "tools" }, steps.length > 1 ? select : null, earlier, later, count), box);
}

function lanes(report: Report, step: number, links: number[], fromStart: boolean, open: (i: number) => void): SVGElement {
  const r = report, members = r.links(), names = r.index.links!.names;
  const ranks = [...new Set(links.flatMap((link) => members.get(link)!.map((i) => r.rank[i])))].sort((a, b) => a - b).slice(0, LANES);
  const lane = new Map(ranks.map((rank, at) => [rank, TOP + at * HIGH]));
  const width = LEFT + (links.length + 3) * WIDE, height = TOP + ranks.length * HIGH;
  const svg = s("svg", { class: "graph", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": t("collectives") });
  const x = (column: number) => LEFT + (column + 1.5) * WIDE;
  const least = SEVERITIES.length - 1;
  for (const rank of ranks) {
    const y = lane.get(rank)!;
    svg.append(s("text", { x: 4, y: y + 4 }, `${t("rank")} ${rank}`));
    // what a rank did between two collectives has the colour of the worst of it
    const stops: [number, number][] = [];
    links.forEach((link, column) => { const i = members.get(link)!.find((each) => r.rank[each] === rank); if (i !== undefined) stops.push([i, column]); });
    let before = fromStart ? -1 : (stops[0]?.[0] ?? 0), at = fromStart ? LEFT : x(stops[0]?.[1] ?? 0);
    for (const [i, column] of [...stops, [r.n, links.length] as [number, number]]) {
      let worst = least, cause = -1;
      for (let k = before + 1; k < i; k++) {
        if (r.rank[k] !== rank || r.step[k] !== step || r.flags[k] & FLAG.container) continue;
        if (r.severity[k] < worst) worst = r.severity[k];
        if (SEVERITIES[r.severity[k]] === "culprit" && cause < 0) cause = k;
      }
      svg.append(s("line", { x1: at, y1: y, x2: x(column), y2: y, class: `lane ${SEVERITIES[worst]}` }));
      if (cause >= 0) svg.append(mark(r, cause, (at + x(column)) / 2, y, open));
      before = i;
      at = x(column);
    }
  }
  links.forEach((link, column) => {
    const [api, group, number] = names[link];
    const calls = members.get(link)!.filter((i) => lane.has(r.rank[i]));
    const ys = calls.map((i) => lane.get(r.rank[i])!);
    if (!ys.length) return;
    const worst = Math.min(...calls.map((i) => r.severity[i]));
    const words = `${api} #${number}, ${group || t("allRanks")}`;
    svg.append(s("text", { x: 0, y: 0, class: "second", transform: `translate(${x(column) - 4} ${TOP - 14}) rotate(-45)` }, `${api} #${number}`.slice(0, 14)),
      s("path", { d: `M${x(column)} ${Math.min(...ys)}V${Math.max(...ys)}`, class: `joined ${SEVERITIES[worst]}` }));
    for (const i of calls) {
      const kind = SEVERITIES[r.severity[i]];
      const label = `${words}, ${t("rank")} ${r.rank[i]}: ${tOf("sev_", kind)}`;
      svg.append(s("circle", {
        cx: x(column), cy: lane.get(r.rank[i])!, r: 6, class: `stop ${kind}`, role: "button", tabindex: r.severity[i] < least ? 0 : -1, "aria-label": label,
        click: () => open(i), keydown: (event: KeyboardEvent) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(i); } },
      }, s("title", {}, label)));
    }
  });
  return svg;
}

/** Where a cause begins, on the line of its rank. */
function mark(report: Report, i: number, x: number, y: number, open: (i: number) => void): SVGElement {
  const label = `${report.nameOf(i)}, ${tOf("sev_", "culprit")}`;
  return s("path", {
    d: `M${x} ${y - 9}l9 16h-18z`, class: "origin", role: "button", tabindex: 0, "aria-label": label, click: () => open(i),
    keydown: (event: KeyboardEvent) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(i); } },
  }, s("title", {}, label));
}

/** Of a call that spoke with other ranks: the same on those. */
export function sameOnOthers(report: Report, i: number, open: (i: number) => void): HTMLElement | null {
  if (!report.nameOf(i).startsWith("Distributed.")) return null;
  for (const [link, calls] of report.links()) {
    if (!calls.includes(i) || calls.length < 2) continue;
    const [api, group, number] = report.index.links!.names[link];
    return h("div", {}, h("h3", {}, t("sameOnOthers")), h("p", { class: "sub" }, `${api} #${number}, ${group ? `${t("rank")} ${group}` : t("allRanks")}`),
      h("ul", { class: "links" }, ...calls.filter((each) => each !== i).slice(0, 64).map((each) => h("li", {}, h("i", { class: `dot ${report.severityOf(each)}`, "aria-hidden": "true" }), ` ${t("rank")} ${report.rank[each]} `,
        h("button", { class: "link", click: () => open(each) }, name(report.nameOf(each))), ` ${tOf("sev_", report.severityOf(each))}`))));
  }
  return null;
}
