// The page: what it shows by the kind of its data, languages, colours, and links into it.

import "./style.css";
import { CallPanel } from "./call";
import { CallsTable } from "./calls";
import { command, viewCommand } from "./commands";
import { block, Index, laterBlock, Report, Served } from "./data";
import { clear, h, name, whole } from "./dom";
import { checkPage, folderPage, guardPage, incidentPage } from "./documents";
import { GraphView } from "./graph";
import { ranksSection } from "./ranks";
import { sheetPage } from "./sheet";
import { Timeline } from "./timeline";
import { environmentsSection, verdictSection } from "./verdict";
import { currentLanguage, setLanguage, setSentences, t, Word } from "./words";

const page = document.getElementById("page")!;

function remember(key: string, value?: string): string | null {
  try { // a page from a file may have no storage
    if (value !== undefined) localStorage.setItem(`tensorprobe.${key}`, value);
    return localStorage.getItem(`tensorprobe.${key}`);
  } catch {
    return null;
  }
}

const dark = (): boolean => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

interface Shown { timeline?: Timeline; graph?: GraphView; panel?: CallPanel; table?: CallsTable; report?: Report }
let shown: Shown = {};

function header(index: { kind: string; tool?: string; lacks?: boolean; of?: number; n?: number }, links: [string, Word][], again: () => void): HTMLElement {
  return h("header", {}, links.length ? h("a", { class: "skip", href: "#calls" }, t("skip")) : null,
    h("span", { class: "brand" }, "tensorprobe", index.tool ? h("span", { class: "sub" }, ` ${index.tool}`) : null),
    h("nav", { "aria-label": "tensorprobe" }, ...links.map(([id, word]) => h("a", { href: `#${id}`, click: (event: Event) => { event.preventDefault(); document.getElementById(id)?.scrollIntoView(); } }, t(word)))),
    h("span", { class: "buttons" },
      h("button", { id: "language", click: () => { setLanguage(currentLanguage() === "en" ? "zh" : "en"); remember("language", currentLanguage()); again(); } }, t("language")),
      h("button", { id: "theme", "aria-label": t("theme"), title: t("theme"), click: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; remember("theme", document.documentElement.dataset.theme); shown.timeline?.redraw(); } }, "◐")));
}

function parseHash(): URLSearchParams {
  return new URLSearchParams(location.hash.slice(1));
}

/** `#call=NAME&step=0&rank=0`: by name, so that a link outlives another comparison. */
function linkTo(report: Report, i: number): string {
  const words = new URLSearchParams({ call: report.nameOf(i) });
  if (report.step[i]) words.set("step", String(report.step[i]));
  if (report.rank[i]) words.set("rank", String(report.rank[i]));
  return `#${words}`;
}

function linked(report: Report): number {
  const words = parseHash();
  const wanted = words.get("call");
  return wanted === null ? -1 : report.find(wanted, Number(words.get("step") ?? 0), Number(words.get("rank") ?? 0));
}

function showReport(report: Report): void {
  const { index } = report;
  const go = (i: number): void => {
    if (i < 0 || i >= report.n) return;
    history.replaceState(null, "", linkTo(report, i));
    follow(i);
  };
  const follow = (i: number): void => {
    document.body.classList.add("with-panel");
    void panel.show(i);
    timeline?.select(i);
    graph.select(i);
    table.reveal(i);
  };
  const close = (): void => {
    history.replaceState(null, "", location.pathname + location.search);
    panel.hide();
    document.body.classList.remove("with-panel");
    timeline?.select(-1);
    graph.select(-1);
    (document.querySelector("#verdict button") as HTMLElement | null)?.focus({ preventScroll: true });
  };
  const panel = new CallPanel(report, go, close, (i) => { graph.reveal(i); document.getElementById("graph")?.scrollIntoView(); });
  const table = new CallsTable(report, go, () => timeline?.all());
  const timeline = report.isComparison && report.n ? new Timeline(report, go, (range) => table.brush(range)) : null;
  const graph = new GraphView(report, go);
  const main = h("main", {});
  if (report.isComparison) main.append(verdictSection(report, go));
  else main.append(h("section", { id: "verdict" }, h("h1", { id: "answer" }, name(index.path ?? "")), h("p", { class: "sub" }, t("rowsShown", { n: whole(report.n), all: whole(report.n) }))));
  if (index.lacks) main.append(h("section", { class: "note warn" }, index.of ? h("p", {}, t("thinned", { n: whole(report.n), all: whole(index.of) })) : null, h("p", {}, t("notInFile")), command(viewCommand(report))));
  if (timeline) main.append(timeline.element);
  const ranks = ranksSection(report, go);
  if (ranks) main.append(ranks);
  if (report.n) main.append(graph.element);
  main.append(table.element, environmentsSection(report));
  const links: [string, Word][] = [...(timeline ? [["timeline", "timeline"] as [string, Word]] : []), ...(ranks ? [["ranks", "ranks"] as [string, Word]] : []), ["graph", "graph"], ["calls", "calls"]];
  clear(page);
  page.append(header(index, links, () => showReport(report)), main, panel.element);
  shown = { timeline: timeline ?? undefined, graph, panel, table, report };
  const at = linked(report);
  if (at >= 0) follow(at);
  else {
    document.body.classList.remove("with-panel");
    const cause = index.verdict?.culprits[0];
    if (cause) table.reveal(report.find(cause.name, cause.step, cause.rank)); // the table begins where it went wrong
  }
  window.onhashchange = () => { const i = linked(report); if (i >= 0) follow(i); };
}

function showDocument(index: any): void {
  const pages: Record<string, (index: any) => HTMLElement[]> = { check: checkPage, guard: guardPage, incident: incidentPage, sheet: sheetPage };
  const sections = pages[index.kind](index);
  const links: [string, Word][] = index.kind === "check" ? [["accuracy", "accuracy"], ["calls", "calls"]] : [];
  clear(page);
  page.append(header(index, links, () => showDocument(index)), h("main", {}, ...sections));
}

function showFolder(served: any): void {
  clear(page);
  page.append(header({ kind: "folder" }, [], () => showFolder(served)), h("main", {}, ...folderPage(served.items)));
}

/** Paper cannot be clicked: what is folded is open there, and the model is laid out. */
function openForPrint(): void {
  let opened: HTMLDetailsElement[] = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll<HTMLDetailsElement>("details:not([open])")];
    for (const each of opened) each.open = true;
    shown.graph?.ready();
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
}

async function start(): Promise<void> {
  const language = remember("language");
  setLanguage(language === "zh" || language === "en" ? language : currentLanguage());
  const theme = remember("theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => shown.timeline?.redraw());
  openForPrint();
  const served = block("served");
  if (served !== null && served.open === null) return showFolder(served);
  const source = served === null ? null : new Served(served.open);
  const index = (source === null ? block("index") : await source.get("index")) as Index;
  performance.mark("read");
  setSentences(index.chinese ?? {});
  if (index.kind === "compare" || index.kind === "capture") showReport(new Report(index, () => laterBlock("details"), source));
  else showDocument(index);
  requestAnimationFrame(() => setTimeout(() => performance.mark("usable"))); // table and timeline are on the screen
}

// for the tests and benchmarks, which look at what is shown
Object.defineProperty(window, "tensorprobe", { get: () => shown });

start().catch((error: unknown) => {
  page.prepend(h("p", { class: "note warn", role: "alert" }, String(error)));
});
