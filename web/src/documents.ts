// The pages of a check, of a guard, of an incident, and of a folder.

import { command } from "./commands";
import { h, name, number, said, whole } from "./dom";
import { plainTable, VirtualTable } from "./table";
import { sourceLines } from "./verdict";
import { sentence, t, tOf, Word } from "./words";

type Row = Record<string, any>;

const title = (badge: string, sign: string, words: string): HTMLElement =>
  h("h1", { id: "answer" }, h("span", { class: "badge" }, h("span", { "aria-hidden": "true" }, `${sign} `), badge), " ", words);

const text = (value: unknown): HTMLElement => said(value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
const list = (word: Word, items: unknown[]): HTMLElement | null =>
  items.length ? h("div", { class: "note warn" }, h("strong", {}, t(word)), h("ul", {}, ...items.map((each) => h("li", {}, text(each))))) : null;

// --- check

export function checkPage(index: Row): HTMLElement[] {
  const counts = index.counts as Record<string, number>;
  const rows = index.calls as Row[];
  const bad = counts.fail + counts.crashed;
  const wrong = rows.filter((row) => row.recorded).length;
  const words = bad ? t("check_bad", { n: whole(bad) }) : wrong ? t("check_recorded", { n: whole(wrong) }) : counts.pass ? t("check_ok") : t("check_none");
  const isWell = !bad && !wrong && counts.pass > 0;
  const section = h("section", { class: `verdict ${isWell ? "match" : bad || wrong ? "diverged" : "incomparable"}`, id: "verdict" },
    title(isWell ? t("pass") : bad || wrong ? t("fail") : t("skipped"), isWell ? "✓" : bad || wrong ? "✗" : "?", words),
    h("p", { class: "sub" }, t("checkHelp")),
    h("div", { class: "facts" }, ...(["pass", "fail", "crashed", "skipped"] as const).map((key) => h("div", { class: `fact ${(key === "fail" || key === "crashed") && counts[key] ? "bad" : ""}` }, h("span", { class: "fact-value" }, whole(counts[key])), h("span", { class: "fact-what" }, t(key))))));
  const first = rows.find((row) => row.verdict === "fail" || row.verdict === "crashed") ?? rows.find((row) => row.recorded);
  if (first) section.append(h("p", {}, name(first.name), ": ", text(first.recorded || first.reason)), first.repro ? h("div", { class: "next" }, h("h2", {}, t("next")), command(first.repro)) : "");
  const notes = list("notes", index.notes ?? []);
  if (notes) section.append(notes);
  return [section, byOperator(rows), callRows(rows)];
}

function byOperator(rows: Row[]): HTMLElement {
  const groups = new Map<string, Row>();
  for (const row of rows) {
    const group = groups.get(row.op) ?? { op: row.op, calls: 0, pass: 0, fail: 0, skipped: 0, crashed: 0, recorded: 0, worst: -1 };
    group.calls += 1 + (row.alike ?? 0);
    group[row.verdict]++;
    if (row.recorded) group.recorded++;
    if (typeof row.error === "number") group.worst = Math.max(group.worst, row.error);
    groups.set(row.op, group);
  }
  const sorted = [...groups.values()].sort((a, b) => b.fail + b.crashed - a.fail - a.crashed || b.recorded - a.recorded || b.worst - a.worst);
  const kinds: Word[] = ["pass", "fail", "crashed", "skipped"];
  if (sorted.some((each) => each.recorded)) kinds.push("recorded");
  const bar = (share: number) => { const box = h("span", { class: "bar", "aria-hidden": "true" }); const fill = h("i", { class: share > 1 ? "bad" : "" }); fill.style.width = `${Math.min(100, share * 100)}%`; box.append(fill); return box; };
  return h("section", { id: "accuracy" }, h("h2", {}, t("accuracy")),
    plainTable([t("c_op"), t("calls"), ...kinds.map((kind) => t(kind)), t("limit"), ""],
      sorted.slice(0, 500).map((each) => [name(each.op), whole(each.calls), ...kinds.map((kind) => whole(each[kind])), each.worst < 0 ? "" : number(each.worst), each.worst < 0 ? "" : bar(each.worst)]),
      [1, ...kinds.map((_, i) => i + 2), kinds.length + 2], t("accuracy")));
}

function callRows(rows: Row[]): HTMLElement {
  const isWrong = (i: number): boolean => rows[i].verdict === "pass" && Boolean(rows[i].recorded);
  const verdictOf = (i: number): string => (isWrong(i) ? t("recorded") : tOf("", rows[i].verdict));
  const severityOf = (i: number): string => (isWrong(i) ? "fail" : rows[i].verdict);
  const by = (key: string) => (a: number, b: number) => (String(rows[a][key] ?? "") < String(rows[b][key] ?? "") ? -1 : 1);
  const place = (i: number): number => (["fail", "crashed"].includes(rows[i].verdict) ? 0 : isWrong(i) ? 1 : 2);
  const order = rows.map((_, i) => i).sort((a, b) => place(a) - place(b));
  const detail = h("div", { class: "detail", tabindex: -1 });
  const open = (at: number): void => {
    const row = rows[at];
    detail.replaceChildren(h("h3", {}, name(row.name)), h("p", {}, text(row.reason)), row.recorded ? h("p", { class: "note warn" }, text(row.recorded)) : "",
      plainTable([t("t_name"), t("t_kind"), t("t_error"), t("limit"), t("m_max_abs"), t("reason")],
        (row.tensors ?? []).map((each: Row) => [name(each.name), `${each.device_dtype} [${each.shape}]`, each.error === null ? "" : number(each.error), number(each.limit), number(each.max_abs), text(each.reason)]), [2, 3, 4], t("tensors")),
      row.repro ? command(row.repro) : "");
    detail.focus();
  };
  const table = new VirtualTable([
    { title: t("verdict"), width: "128px", cell: (i) => h("span", { class: `severity ${severityOf(i)}` }, verdictOf(i)), compare: (a, b) => (verdictOf(a) < verdictOf(b) ? -1 : 1) },
    { title: t("c_name"), width: "minmax(180px, 2fr)", cell: (i) => name(rows[i].name), compare: by("name") },
    { title: t("c_op"), width: "minmax(140px, 1.4fr)", cell: (i) => name(rows[i].op), compare: by("op") },
    { title: t("c_module"), width: "minmax(100px, 1fr)", cell: (i) => name(rows[i].module), compare: by("module") },
    { title: t("limit"), width: "90px", right: true, cell: (i) => (typeof rows[i].error === "number" ? number(rows[i].error) : ""), compare: (a, b) => (rows[a].error ?? -1) - (rows[b].error ?? -1) },
    { title: t("alike"), width: "70px", right: true, cell: (i) => whole(rows[i].alike ?? 0), compare: (a, b) => (rows[a].alike ?? 0) - (rows[b].alike ?? 0) },
    { title: t("reason"), width: "minmax(160px, 3fr)", cell: (i) => sentence(String(rows[i].reason ?? "")) },
  ], t("calls"), open, severityOf);
  const count = h("span", { class: "count", role: "status" });
  const input = h("input", { type: "search", class: "filter", placeholder: t("filter"), "aria-label": t("filter") });
  const filter = (): void => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = order.filter((i) => { const r = rows[i]; const line = `${verdictOf(i)} ${r.verdict} ${r.name} ${r.op} ${r.module} ${r.reason}`.toLowerCase(); return words.every((word) => line.includes(word)); });
    table.show(found);
    count.textContent = t("rowsShown", { n: whole(found.length), all: whole(rows.length) });
  };
  input.addEventListener("input", filter);
  filter();
  return h("section", { id: "calls" }, h("h2", {}, t("calls")), h("div", { class: "tools" }, input, count), table.element, detail);
}

// --- guard

export function guardPage(index: Row): HTMLElement[] {
  const findings = index.findings as Row[];
  if (!findings.length) return [h("section", { class: "verdict match", id: "verdict" }, title(t("pass"), "✓", t("guard_ok"))), ...warningsOf(index)];
  return [...findings.map((each, at) => finding(each, at === 0)), ...warningsOf(index)];
}

function warningsOf(index: Row): HTMLElement[] {
  const found = Object.entries(index).filter(([key, value]) => Array.isArray(value) && value.length && !["findings", "text"].includes(key));
  return found.map(([key, value]) => h("section", {}, h("div", { class: "note warn" }, h("strong", {}, name(key)), h("ul", {}, ...(value as unknown[]).map((each) => h("li", {}, text(each)))))));
}

function finding(each: Row, isFirst: boolean): HTMLElement {
  const [before, after] = t(each.kind === "error" ? "guard_error" : "guard_nonfinite").split("{name}");
  const section = h("section", { class: "verdict diverged", id: isFirst ? "verdict" : null },
    h(isFirst ? "h1" : "h2", {}, h("span", { class: "badge" }, h("span", { "aria-hidden": "true" }, "✗ "), each.kind === "error" ? t("fail") : "NaN / Inf"), " ", before, name(each.name, { class: "name culprit-name" }), after),
    h("p", { class: "reason" }, text(each.reason)),
    h("p", { class: "where" }, `${t("inModule")} `, each.module ? name(each.module) : t("theProgram"), ", ", name(each.op), ` · ${t("step")} ${each.step}, ${t("rank")} ${each.rank}`));
  if (each.source) section.append(sourceLines(each.source));
  if (each.next) section.append(h("div", { class: "next" }, h(isFirst ? "h2" : "h3", {}, t("next")), command(each.next)));
  if (each.repro) section.append(command(`python ${each.repro}/repro.py`, t("shownAlone")));
  if (each.inputs) section.append(h("p", {}, t("savedInputs"), ": ", name(each.inputs)));
  if (each.travelled?.length || each.reached) {
    const rest = each.affected - (each.travelled?.length ?? 0);
    section.append(h("h3", {}, t("travelled")), h("ol", { class: "travel" }, h("li", { class: "culprit" }, name(each.name)), ...(each.travelled ?? []).map((call: string) => h("li", {}, name(call))),
      rest > 0 ? h("li", { class: "sub" }, t("andMore", { n: whole(rest) })) : null, each.reached ? h("li", { class: "end" }, t("reached", { what: each.reached })) : null));
  }
  if (each.stack?.length) section.append(h("h3", {}, t("stack")), h("ol", { class: "stack" }, ...each.stack.map((frame: string) => h("li", {}, name(frame)))));
  const metrics = Object.entries(each.metrics ?? {});
  if (metrics.length) section.append(h("h3", {}, t("statistics")), metricsTable(metrics));
  return section;
}

function metricsTable(metrics: [string, unknown][]): HTMLElement {
  const isTree = metrics.every(([, value]) => value !== null && typeof value === "object" && !Array.isArray(value));
  if (!isTree) return plainTable(["", ""], metrics.map(([key, value]) => [name(key), text(value)]), [], t("statistics"));
  const head = [...new Set(metrics.flatMap(([, value]) => Object.keys(value as Row)))];
  return plainTable(["", ...head], metrics.map(([key, value]) => [name(key), ...head.map((column) => text((value as Row)[column]))]), [], t("statistics"));
}

// --- incident

/** A fact as lines of a table: each part of a larger one has its own. */
function lines(key: string, value: unknown): (HTMLElement | string)[][] {
  if (value !== null && typeof value === "object" && !Array.isArray(value))
    return Object.entries(value).filter(([, part]) => part !== null && part !== "").map(([inner, part]) => [h("span", { class: "key-name" }, name(`${key}.${inner}`)), text(part)]);
  return [[h("span", { class: "key-name" }, name(key)), text(Array.isArray(value) ? value.map((each) => (typeof each === "string" ? each : JSON.stringify(each))).join(", ") : value)]];
}

export function incidentPage(index: Row): HTMLElement[] {
  const incidents = index.incidents as Row[];
  if (!incidents.length) return [h("section", { class: "verdict match", id: "verdict" }, title(t("pass"), "✓", t("incident_none")))];
  return incidents.map((each, at) => {
    const section = h("section", { class: "verdict diverged", id: at === 0 ? "verdict" : null },
      h(at === 0 ? "h1" : "h2", { id: at === 0 ? "answer" : null }, h("span", { class: "badge" }, h("span", { "aria-hidden": "true" }, "✗ "), t("aiCoreError")), " ", name(each.node ?? each.kernel ?? "?", { class: "name culprit-name" }), each.op_type && each.op_type !== each.node ? ` (${each.op_type})` : ""),
      h("p", { class: "fault" }, text(each.conclusion)));
    const next = (each.next ?? []) as string[];
    if (next.length) section.append(h("div", { class: "next" }, h("h2", {}, t("next")), ...next.map((step) => (/^(tensorprobe|python|export|msaicerr) /.test(step) ? command(step) : h("p", {}, text(step))))));
    const facts = Object.entries(each).filter(([key, value]) => !["conclusion", "next", "inputs", "outputs", "values", "warnings", "missing", "error_bits", "cores", "addresses"].includes(key) && value !== null && value !== "" && !(Array.isArray(value) && !value.length));
    section.append(h("h3", {}, t("details")), plainTable(["", ""], facts.flatMap(([key, value]) => lines(key, value)), [], t("details")));
    for (const key of ["error_bits", "cores", "inputs", "outputs", "values", "addresses"]) {
      const rows = (each[key] ?? []) as Row[];
      if (!rows.length) continue;
      const head = [...new Set(rows.flatMap((row) => Object.keys(row)))];
      section.append(h("h3", {}, key), plainTable(head, rows.map((row) => head.map((column) => text(row[column]))), [], key));
    }
    const warnings = list("warnings", each.warnings ?? []);
    if (warnings) section.append(warnings);
    if (each.missing?.length) section.append(h("h3", {}, t("missing")), plainTable(["", t("reason"), ""], each.missing.map((row: Row) => [text(row.what), text(row.why), text((row.settings ?? []).join("\n"))]), [], t("missing")));
    return section;
  });
}

// --- a folder

export function folderPage(items: Row[]): HTMLElement[] {
  const rows = items.map((item, at) => [h("a", { href: `?open=${at}` }, name(item.path)), name(item.kind), text(item.about)]);
  return [h("section", { id: "verdict" }, h("h1", { id: "answer" }, t("folder")), h("p", { class: "sub" }, t("folderHelp")),
    rows.length ? plainTable([t("c_name"), t("kind"), ""], rows, [], t("folder")) : h("p", {}, t("empty")))];
}
