// The model as a graph: modules that open level by level, down to calls; arrows are the recorded data flow.
// dagre lays it out: only what is open, so a few hundred boxes at most.

import { Graph, layout } from "@dagrejs/dagre";
import { BOTH, FLAG, ONLY_ACTUAL, ONLY_EXPECTED, Report, SEVERITIES } from "./data";
import { h, number, s } from "./dom";
import { marksOf } from "./calls";
import { cut } from "./timeline";
import { t, tOf } from "./words";

const MOST = 300; // boxes that are laid out
const DEEPEST = 40;
const SIDE_BY_SIDE = 40; // modules in one
const HIGH = 40;
const ROOM = 8; // above a module, for its name

interface Module { id: string; label: string; parent: Module | null; modules: Map<string, Module>; calls: number[]; open: boolean; total: number; worst: number }
interface Box { id: string; x: number; y: number; width: number; height: number }

const newModule = (id: string, label: string, parent: Module | null): Module =>
  ({ id, label, parent, modules: new Map(), calls: [], open: false, total: 0, worst: SEVERITIES.length - 1 });

/** Many modules side by side become a few groups: to lay out hundreds takes seconds. */
function fold(module: Module): void {
  const inside = [...module.modules.values()];
  if (inside.length > SIDE_BY_SIDE) {
    const size = Math.ceil(inside.length / Math.ceil(Math.min(inside.length / 10, SIDE_BY_SIDE / 2)));
    module.modules = new Map();
    for (let at = 0; at < inside.length; at += size) {
      const part = inside.slice(at, at + size);
      const label = `${part[0].label} … ${part[part.length - 1].label}`;
      const group = newModule(`${module.id}[${at}]`, label, module);
      for (const each of part) {
        each.parent = group;
        group.modules.set(each.label, each);
        group.total += each.total;
        group.worst = Math.min(group.worst, each.worst);
      }
      module.modules.set(group.id, group);
    }
  }
  for (const each of module.modules.values()) fold(each);
}

export class GraphView {
  readonly element: HTMLElement;
  private readonly panes = h("div", { class: "panes" });
  private readonly message = h("p", { class: "note warn", hidden: true });
  private readonly unit: HTMLSelectElement;
  private readonly direction: HTMLSelectElement;
  private readonly view: HTMLSelectElement;
  private root!: Module;
  private moduleOf = new Map<number, Module>();
  private way: Set<number> = new Set();
  private selected = -1;
  private scale = 1;
  private made = false;
  lastLayout = { boxes: 0, edges: 0, ms: 0 };

  constructor(private readonly report: Report, private readonly open: (i: number) => void) {
    const units: string[] = [];
    const seen = new Set<string>();
    for (let i = 0; i < report.n; i++) {
      const key = `${report.rank[i]},${report.step[i]}`;
      if (!seen.has(key) && units.length < 2000) { seen.add(key); units.push(key); }
    }
    this.unit = h("select", { "aria-label": `${t("step")}, ${t("rank")}`, change: () => this.rebuild() },
      ...units.map((key) => { const [rank, step] = key.split(","); return h("option", { value: key }, `${t("step")} ${step}, ${t("rank")} ${rank}`); }));
    this.direction = h("select", { "aria-label": t("showDirection"), change: () => this.rebuild() },
      h("option", { value: "1" }, t("phase_1")), h("option", { value: "2" }, t("phase_2")));
    this.view = h("select", { "aria-label": t("graph"), change: () => this.draw() },
      h("option", { value: "one" }, t("overlaid")), h("option", { value: "two" }, t("sideBySide")));
    const search = h("input", { type: "search", placeholder: t("searchGraph"), "aria-label": t("searchGraph"), list: "graph-names" });
    search.addEventListener("keydown", (event) => { if (event.key === "Enter") this.find(search.value); });
    const culprit = report.index.verdict?.culprits[0];
    this.element = h("section", { id: "graph", "aria-labelledby": "graph-title" },
      h("h2", { id: "graph-title" }, t("graph")), h("p", { class: "sub" }, t("graphHelp")),
      h("div", { class: "tools" }, search, this.unit, this.direction, report.isComparison ? this.view : null,
        culprit ? h("button", { click: () => this.jump() }, t("jumpCulprit")) : null,
        culprit ? h("button", { click: () => this.wayToLoss() }, t("wayToLoss")) : null,
        h("button", { click: () => this.closeAll() }, t("closeAll")),
        h("button", { "aria-label": t("zoomIn"), click: () => this.zoom(1.25) }, "+"), h("button", { "aria-label": t("zoomOut"), click: () => this.zoom(0.8) }, "−")),
      this.message, this.panes);
    // laid out when it comes into sight: the answer above must not wait for it
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((each) => each.isIntersecting)) return;
      observer.disconnect();
      setTimeout(() => this.ready(), 50);
    }).observe(this.element);
  }

  /** Lay it out, if it is not yet. */
  ready(): void {
    if (this.made) return;
    this.made = true;
    const first = this.report.index.verdict?.culprits[0];
    const at = first ? this.report.find(first.name, first.step, first.rank) : -1;
    if (at >= 0) this.choose(at);
    this.rebuild(at < 0);
    if (at >= 0) this.jump(false);
  }

  private choose(i: number): void {
    this.unit.value = `${this.report.rank[i]},${this.report.step[i]}`;
    this.direction.value = this.report.phase[i] === 2 ? "2" : "1";
  }

  private rebuild(draw = true): void {
    const r = this.report;
    const [rank, step] = this.unit.value.split(",").map(Number);
    const backward = this.direction.value === "2";
    this.root = newModule("", "", null);
    this.root.open = true;
    this.moduleOf = new Map();
    const phase = backward ? 2 : 1; // set-up and optimizer steps are no part of the model
    for (let i = 0; i < r.n; i++) {
      if (r.rank[i] !== rank || r.step[i] !== step || r.phase[i] !== phase || r.flags[i] & FLAG.container) continue;
      let at = this.root;
      at.total++;
      const path = r.moduleOf(i);
      const parts = path ? path.split(".") : [];
      if (parts.length > DEEPEST) parts.splice(DEEPEST, parts.length, parts.slice(DEEPEST).join("."));
      for (const part of parts) {
        let next = at.modules.get(part);
        if (!next) { next = newModule(at.id ? `${at.id}.${part}` : part, part, at); at.modules.set(part, next); }
        at = next;
        at.total++;
      }
      at.calls.push(i);
      this.moduleOf.set(i, at);
      for (let up: Module | null = at; up; up = up.parent) up.worst = Math.min(up.worst, r.severity[i]);
    }
    fold(this.root);
    let only = this.root;
    while (only.modules.size === 1 && !only.calls.length) { only = [...only.modules.values()][0]; only.open = true; }
    this.way = new Set();
    if (draw) this.draw();
  }

  private closeAll(): void {
    this.rebuild();
  }

  private zoom(factor: number): void {
    this.scale = Math.max(0.3, Math.min(2.5, this.scale * factor));
    this.draw();
  }

  /** Open what a call is in, and show it. */
  reveal(i: number, focus = true): void {
    this.ready();
    const unit = `${this.report.rank[i]},${this.report.step[i]}`, backward = this.report.phase[i] === 2 ? "2" : "1";
    if (this.unit.value !== unit || this.direction.value !== backward) { this.choose(i); this.rebuild(false); }
    for (let up: Module | null = this.moduleOf.get(i) ?? null; up; up = up.parent) up.open = true;
    this.selected = i;
    this.draw();
    this.center(focus);
  }

  select(i: number): void {
    this.selected = i;
    if (!this.made) return;
    for (const each of this.panes.querySelectorAll(".box.selected")) each.classList.remove("selected");
    for (const each of this.panes.querySelectorAll(`[data-call="${i}"]`)) each.classList.add("selected");
  }

  private jump(focus = true): void {
    const first = this.report.index.verdict?.culprits[0];
    const at = first ? this.report.find(first.name, first.step, first.rank) : -1;
    if (at >= 0) this.reveal(at, focus);
  }

  private center(focus: boolean): void {
    for (const box of this.panes.querySelectorAll<SVGElement>(".box.selected")) {
      const pane = box.closest(".pane") as HTMLElement;
      const here = box.getBoundingClientRect(), around = pane.getBoundingClientRect();
      pane.scrollLeft += here.left - around.left - around.width / 2 + here.width / 2;
      pane.scrollTop += here.top - around.top - around.height / 2 + here.height / 2;
      if (focus) {
        this.element.scrollIntoView({ block: "nearest" });
        box.focus({ preventScroll: true });
      }
      break;
    }
  }

  private find(wanted: string): void {
    const words = wanted.toLowerCase();
    if (!words) return;
    const r = this.report;
    const hits = (i: number) => r.nameOf(i).toLowerCase().includes(words) || r.moduleOf(i).toLowerCase().includes(words);
    const order = [...this.moduleOf.keys()];
    const after = order.filter((i) => i > this.selected), found = [...after, ...order].find(hits) ?? Array.from({ length: r.n }, (_, i) => i).find((i) => !(r.flags[i] & FLAG.container) && hits(i));
    if (found !== undefined) this.reveal(found);
  }

  /** From the culprit to the last forward call, by the shortest way that data went. */
  private wayToLoss(): void {
    const r = this.report;
    const first = r.index.verdict?.culprits[0];
    const start = first ? r.find(first.name, first.step, first.rank) : -1;
    if (start < 0) return;
    this.ready();
    const users = new Map<number, number[]>();
    for (let k = 0; k < r.edgeSource.length; k++) {
      if (r.flags[r.edgeTarget[k]] & FLAG.container) continue;
      const list = users.get(r.edgeSource[k]);
      if (list) list.push(r.edgeTarget[k]);
      else users.set(r.edgeSource[k], [r.edgeTarget[k]]);
    }
    const from = new Map<number, number>([[start, -1]]);
    const queue = [start];
    let last = start;
    for (let at = 0; at < queue.length; at++) {
      const here = queue[at];
      if (r.phase[here] === r.phase[start] && r.step[here] === r.step[start] && here > last) last = here;
      for (const user of users.get(here) ?? [])
        if (!from.has(user) && r.rank[user] === r.rank[start] && r.step[user] === r.step[start] && r.phase[user] === r.phase[start]) { from.set(user, here); queue.push(user); }
    }
    this.reveal(start, false);
    for (let at = last; at >= 0; at = from.get(at) ?? -1) this.way.add(at);
    this.draw();
    this.center(true);
  }

  private toggle(module: Module): void {
    module.open = !module.open;
    this.draw();
    (this.panes.querySelector(`[data-module="${CSS.escape(module.id)}"]`) as SVGElement | null)?.focus();
  }

  private draw(): void {
    if (!this.made) return;
    const r = this.report;
    const start = performance.now();
    const graph = new Graph({ compound: true, multigraph: false });
    graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 34, marginx: 12, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({}));
    const shownAs = new Map<number, string>();
    const boxes: { id: string; module?: Module; call?: number }[] = [];
    const clusters: Module[] = [];
    const hide = (module: Module, id: string): void => {
      for (const i of module.calls) shownAs.set(i, id);
      for (const each of module.modules.values()) hide(each, id);
    };
    const add = (module: Module, parent: string | null): void => {
      for (const i of module.calls) {
        const id = `c${i}`;
        boxes.push({ id, call: i });
        shownAs.set(i, id);
        if (parent !== null) parents.push([id, parent]);
      }
      for (const each of module.modules.values()) {
        const id = `m${each.id}`;
        if (each.open) {
          clusters.push(each);
          if (parent !== null) parents.push([id, parent]);
          add(each, id);
        } else {
          boxes.push({ id, module: each });
          hide(each, id);
          if (parent !== null) parents.push([id, parent]);
        }
      }
    };
    const parents: [string, string][] = [];
    add(this.root, null);
    this.message.hidden = boxes.length <= MOST;
    if (boxes.length > MOST) {
      this.message.textContent = t("tooMany", { n: boxes.length });
      this.panes.replaceChildren();
      return;
    }
    for (const { id, module, call } of boxes) graph.setNode(id, { width: Math.min(250, Math.max(96, 7.2 * this.label(module, call).length + 30, 6.6 * this.second(module, call).length + 16)), height: HIGH });
    for (const each of clusters) graph.setNode(`m${each.id}`, { label: each.label });
    for (const [child, parent] of parents) graph.setParent(child, parent);
    const edges = new Map<string, { from: string; to: string; side: number; onWay: boolean }>();
    for (let k = 0; k < r.edgeSource.length; k++) {
      const from = shownAs.get(r.edgeSource[k]), to = shownAs.get(r.edgeTarget[k]);
      if (from === undefined || to === undefined || from === to) continue;
      const key = `${from}\u0000${to}`;
      const onWay = this.way.has(r.edgeSource[k]) && this.way.has(r.edgeTarget[k]);
      const known = edges.get(key);
      if (known) { if (known.side !== r.edgeSide[k]) known.side = BOTH; known.onWay ||= onWay; }
      else { edges.set(key, { from, to, side: r.edgeSide[k], onWay }); graph.setEdge(from, to); }
    }
    layout(graph);
    this.lastLayout = { boxes: boxes.length, edges: edges.size, ms: performance.now() - start };
    const sides = this.view.value === "two" ? [ONLY_ACTUAL, ONLY_EXPECTED] : [BOTH];
    const scrolled = [...this.panes.children].map((pane) => [pane.scrollLeft, pane.scrollTop]);
    const panes = sides.map((side) => this.pane(graph, boxes, clusters, [...edges.values()], side));
    this.panes.replaceChildren(...panes);
    panes.forEach((pane, at) => { const [left, top] = scrolled[at] ?? scrolled[0] ?? [0, 0]; pane.scrollLeft = left; pane.scrollTop = top; });
    if (panes.length === 2) for (const pane of panes) pane.addEventListener("scroll", () => { for (const other of panes) if (other !== pane) { other.scrollLeft = pane.scrollLeft; other.scrollTop = pane.scrollTop; } });
  }

  private label(module: Module | undefined, call: number | undefined): string {
    if (module) return cut(`▸ ${module.label}`, 30);
    return cut(this.report.nameOf(call!).replace(/\.(forward|backward)$/, "").replace(/^(Functional|Tensor|Torch)\./, ""), 30);
  }

  /** Below the name: what differs, or the error that comes in and the one that goes out. */
  private second(module: Module | undefined, call: number | undefined): string {
    const r = this.report;
    if (module) return t("callsInside", { n: module.total });
    const marks = marksOf(r, call!);
    if (marks.length) return marks.join(", ");
    return r.isComparison ? `${number(r.errorIn[call!])} → ${number(r.errorOut[call!])}` : "";
  }

  private pane(graph: Graph, boxes: { id: string; module?: Module; call?: number }[], clusters: Module[], edges: { from: string; to: string; side: number; onWay: boolean }[], side: number): HTMLElement {
    const r = this.report;
    const about = graph.graph() as { width?: number; height?: number };
    const width = (about.width ?? 100) + 4, height = (about.height ?? 100) + 4;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width: width * this.scale, height: height * this.scale, class: "graph", role: "group", "aria-label": side === BOTH ? t("graph") : t(side === ONLY_ACTUAL ? "actual" : "expected") });
    const marker = `arrow${side}`;
    svg.append(s("defs", {}, s("marker", { id: marker, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, s("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))));
    for (const each of clusters) {
      const box = graph.node(`m${each.id}`) as unknown as Box;
      if (!box || !box.width) continue;
      const group = s("g", { class: `cluster ${SEVERITIES[each.worst]}`, role: "button", tabindex: -1, "aria-expanded": "true", "aria-label": `${each.id}, ${tOf("sev_", SEVERITIES[each.worst])}`, "data-module": each.id, click: () => this.toggle(each), keydown: (event: KeyboardEvent) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.toggle(each); } } },
        s("rect", { x: box.x - box.width / 2, y: box.y - box.height / 2 - ROOM, width: box.width, height: box.height + ROOM, rx: 8 }),
        s("text", { x: box.x - box.width / 2 + 8, y: box.y - box.height / 2 + 14 - ROOM }, cut(`▾ ${each.label}`, Math.max(6, Math.floor(box.width / 7)))));
      svg.append(group);
    }
    for (const { from, to, side: on, onWay } of edges) {
      if (side !== BOTH && on !== BOTH && on !== side) continue;
      const points = (graph.edge(from, to) as unknown as { points: { x: number; y: number }[] }).points;
      const path = points.map((p, at) => `${at ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join("");
      svg.append(s("path", { d: path, class: `edge${on === BOTH ? "" : " one-side"}${onWay ? " way" : ""}`, "marker-end": `url(#${marker})` }));
    }
    for (const { id, module, call } of boxes) {
      if (call !== undefined && side !== BOTH && r.side[call] !== BOTH && r.side[call] !== side) continue;
      const box = graph.node(id) as unknown as Box;
      const kind = SEVERITIES[module ? module.worst : r.severity[call!]];
      const marks = call === undefined ? [] : marksOf(r, call);
      const full = module ? module.id : r.nameOf(call!);
      const act = () => (module ? this.toggle(module) : this.open(call!));
      const onWay = call !== undefined && this.way.has(call);
      svg.append(s("g", {
        class: `box ${kind}${module ? " module" : ""}${call === this.selected ? " selected" : ""}${onWay ? " way" : ""}${call !== undefined && r.side[call] !== BOTH && r.isComparison ? " only" : ""}`,
        role: "button", tabindex: -1, "aria-label": `${full}, ${tOf("sev_", kind)}${marks.length ? `, ${marks.join(", ")}` : ""}`, "aria-expanded": module ? "false" : null,
        "data-call": call, "data-module": module?.id, click: act,
        keydown: (event: KeyboardEvent) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } },
      },
        s("title", {}, `${full}\n${tOf("sev_", kind)}`),
        s("rect", { x: box.x - box.width / 2, y: box.y - box.height / 2, width: box.width, height: box.height, rx: module ? 6 : 14 }),
        s("text", { x: box.x, y: box.y - 2, "text-anchor": "middle" }, this.label(module, call)),
        s("text", { x: box.x, y: box.y + 13, "text-anchor": "middle", class: "second" }, cut(this.second(module, call), Math.floor(box.width / 6)))));
    }
    byArrows(svg);
    return h("div", { class: "pane", tabindex: 0, role: "group", "aria-label": side === BOTH ? t("graph") : t(side === ONLY_ACTUAL ? "actual" : "expected") },
      side === BOTH ? null : h("div", { class: "pane-title" }, t(side === ONLY_ACTUAL ? "actual" : "expected")), svg);
  }
}

const STOPS = ".box, .cluster";
const ARROWS: Record<string, [number, number]> = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

/** One stop for the Tab key; from there arrows go to the nearest box in their direction. */
function byArrows(svg: SVGElement): void {
  let stop = svg.querySelector<SVGElement>(".box.selected, .box.culprit") ?? svg.querySelector<SVGElement>(STOPS);
  stop?.setAttribute("tabindex", "0");
  svg.addEventListener("focusin", (event) => {
    stop?.setAttribute("tabindex", "-1");
    stop = (event.target as Element).closest<SVGElement>(STOPS);
    stop?.setAttribute("tabindex", "0");
  });
  const place = (of: Element): [number, number] => {
    const rect = of.querySelector("rect")!, at = (key: string) => Number(rect.getAttribute(key));
    return of.classList.contains("cluster") ? [at("x"), at("y")] : [at("x") + at("width") / 2, at("y") + at("height") / 2];
  };
  svg.addEventListener("keydown", (event) => {
    const way = ARROWS[event.key];
    if (!way || !stop) return;
    event.preventDefault();
    const [x, y] = place(stop);
    let best: SVGElement | null = null, least = Infinity;
    for (const each of svg.querySelectorAll<SVGElement>(STOPS)) {
      const [to, down] = place(each);
      const along = (to - x) * way[0] + (down - y) * way[1], aside = Math.abs((to - x) * way[1]) + Math.abs((down - y) * way[0]);
      if (each !== stop && along > 1 && along + 2 * aside < least) { least = along + 2 * aside; best = each; }
    }
    best?.focus();
  });
}
