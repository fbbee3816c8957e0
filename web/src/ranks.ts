// Ranks by steps: where a cause begins, and how many calls differ.

import { Report } from "./data";
import { h, whole } from "./dom";
import { t, tOf } from "./words";

const MOST = 200;

export function ranksSection(report: Report, open: (i: number) => void): HTMLElement | null {
  const lines = report.index.verdict?.ranks ?? [];
  const ranks = [...new Set(lines.map((line) => line.rank))].sort((a, b) => a - b).slice(0, MOST);
  const steps = new Set(lines.map((line) => line.step));
  for (let i = 0; i < report.n; i++) if (steps.size < MOST) steps.add(report.step[i]);
  const columns = [...steps].sort((a, b) => a - b).slice(0, MOST);
  if (ranks.length < 2 && columns.length < 2) return null;
  const at = new Map(lines.map((line) => [`${line.rank},${line.step}`, line]));
  const cell = (rank: number, step: number): HTMLElement => {
    const line = at.get(`${rank},${step}`);
    if (!line) return h("td", { class: "later", title: t("notJudged") }, "·");
    const culprit = line.culprit ? report.find(line.culprit, step, rank) : -1;
    const words = `${t("rank")} ${rank}, ${t("step")} ${step}: ${tOf("", line.verdict)}${line.culprit ? `, ${line.culprit}` : ""}, ${line.diverged}`;
    const kind = line.culprit ? "culprit" : line.diverged ? "inherited" : line.verdict === "match" ? "equal" : "one-sided";
    const sign = `${line.culprit ? "▲ " : ""}${line.diverged ? whole(line.diverged) : line.verdict === "match" ? "✓" : "?"}`;
    return h("td", { class: `cell ${kind}`, title: words }, culprit >= 0 ? h("button", { class: "link", "aria-label": words, click: () => open(culprit) }, sign) : sign);
  };
  return h("section", { id: "ranks", "aria-labelledby": "ranks-title" }, h("h2", { id: "ranks-title" }, t("ranks")), h("p", { class: "sub" }, t("ranksHelp")),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": t("ranks") }, h("table", { class: "matrix" },
      h("thead", {}, h("tr", {}, h("td", {}), ...columns.map((step) => h("th", { scope: "col" }, `${t("step")} ${step}`)))),
      h("tbody", {}, ...ranks.map((rank) => h("tr", {}, h("th", { scope: "row" }, `${t("rank")} ${rank}`), ...columns.map((step) => cell(rank, step))))))));
}
