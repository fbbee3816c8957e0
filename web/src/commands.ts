// What to type: each command with a button that copies it.

import { ONLY_EXPECTED, Report } from "./data";
import { announce, copy, h } from "./dom";
import { t } from "./words";

export function command(text: string, what = ""): HTMLElement {
  const button = h("button", { class: "copy", "aria-label": `${t("copy")}: ${text}` }, t("copy"));
  button.addEventListener("click", async () => {
    if (!(await copy(text))) return;
    button.textContent = t("copied");
    announce(t("copied"));
    setTimeout(() => { button.textContent = t("copy"); }, 1500);
  });
  return h("div", { class: "command" }, what ? h("span", { class: "what" }, what) : null, h("code", { dir: "ltr" }, text), button);
}

/** A word as a shell takes it, whatever is in it. */
export function quote(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.split("'").join(`'"'"'`)}'`;
}

/** What was run, with its arguments. */
export const program = (report: Report): string => report.index.program || "train.py";

export function which(report: Report, i: number): string {
  const step = report.step[i] ? ` --step ${report.step[i]}` : "";
  return quote(report.nameOf(i)) + step + (report.rank[i] ? ` --rank ${report.rank[i]}` : "");
}

export function commandsFor(report: Report, i: number): [string, string][] {
  const verdict = report.index.verdict;
  const path = (report.side[i] === ONLY_EXPECTED ? verdict?.expected : verdict?.actual) ?? report.index.path ?? "CAPTURE";
  const found: [string, string][] = [];
  const name = report.nameOf(i);
  const isOperator = !/^(Module|Optimizer)\./.test(name);
  if (isOperator) found.push([t("cmd_repro"), `tensorprobe repro ${quote(path)} ${which(report, i)} -o repro`]);
  found.push([t("cmd_show"), `tensorprobe show ${quote(path)} ${which(report, i)}`]);
  if (isOperator && report.phase[i] < 3)
    found.push([t("cmd_reroute"), `tensorprobe run --reroute ${quote(name.replace(/\.(forward|backward)$/, ""))}=cpu ${program(report)}`]);
  found.push([t("cmd_record"), recordMore(report, i)]);
  return found;
}

export function recordMore(report: Report, i: number): string {
  return `tensorprobe run --keep tensors --calls ${quote(report.nameOf(i))} --steps ${report.step[i]} -o OUT ${program(report)}`;
}

export function viewCommand(report: Report): string {
  const verdict = report.index.verdict;
  return verdict ? `tensorprobe view ${quote(report.index.out ?? "OUT")} ${quote(verdict.actual)} ${quote(verdict.expected)}` : "tensorprobe view PATH";
}
