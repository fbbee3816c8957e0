// A table of any number of rows: only those in sight are in the page.

import { clear, h } from "./dom";

export interface Column {
  title: string; width: string; right?: boolean;
  cell: (row: number) => Node | string;
  compare?: (a: number, b: number) => number;
}

const ROW = 28;

export class VirtualTable {
  readonly element: HTMLElement;
  private readonly body: HTMLElement;
  private readonly spacer: HTMLElement;
  private readonly head: HTMLElement;
  private rows: Int32Array | number[] = [];
  private sorted: number[] = [];
  private by = -1;
  private down = false;
  private active = 0;
  private pending = false;

  constructor(private readonly columns: Column[], label: string, private readonly open: (row: number) => void, private readonly rowClass: (row: number) => string, height = 420) {
    this.head = h("div", { class: "vt-row vt-head", role: "row", "aria-rowindex": 1 });
    this.spacer = h("div", { class: "vt-spacer", role: "none" });
    this.body = h("div", { class: "vt-body", tabindex: 0, role: "rowgroup", "aria-label": label }, this.spacer);
    this.body.style.maxHeight = `${height}px`;
    this.element = h("div", { class: "vt", role: "grid", "aria-label": label, "aria-colcount": columns.length },
      h("div", { role: "rowgroup", class: "vt-headgroup" }, this.head), this.body);
    this.element.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
    this.drawHead();
    this.body.addEventListener("scroll", () => this.later());
    this.body.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.later()).observe(this.body);
  }

  get shown(): number[] { return this.sorted; }

  show(rows: Int32Array | number[]): void {
    this.rows = rows;
    this.sort();
    this.active = 0;
    this.body.scrollTop = 0;
    this.element.setAttribute("aria-rowcount", String(rows.length + 1));
    this.draw();
  }

  /** Scroll to a row and mark it. */
  reveal(row: number): void {
    const at = this.sorted.indexOf(row);
    if (at < 0) return;
    this.active = at;
    const top = at * ROW, seen = this.body.clientHeight;
    if (top < this.body.scrollTop || top + ROW > this.body.scrollTop + seen) this.body.scrollTop = Math.max(0, top - (seen - ROW) / 2);
    this.draw();
  }

  private sort(): void {
    this.sorted = Array.from(this.rows);
    const compare = this.columns[this.by]?.compare;
    if (compare) this.sorted.sort((a, b) => (this.down ? compare(b, a) : compare(a, b)) || a - b);
  }

  private drawHead(): void {
    clear(this.head);
    this.columns.forEach((column, at) => {
      const direction = this.by === at ? (this.down ? "descending" : "ascending") : "none";
      const sign = this.by === at ? (this.down ? " ▼" : " ▲") : "";
      const title = column.compare
        ? h("button", { class: "vt-sort", click: () => this.sortBy(at) }, column.title + sign)
        : column.title;
      this.head.append(h("div", { role: "columnheader", class: column.right ? "vt-cell right" : "vt-cell", "aria-sort": column.compare ? direction : null }, title));
    });
  }

  sortBy(at: number, down?: boolean): void {
    // numbers: the largest first
    this.down = down ?? (this.by === at ? !this.down : !!this.columns[at].right);
    this.by = at;
    this.sort();
    this.drawHead();
    this.body.scrollTop = 0;
    this.active = 0;
    this.draw();
    (this.head.children[at]?.querySelector("button") as HTMLElement | null)?.focus();
  }

  private later(): void {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  private draw(): void {
    const total = this.sorted.length;
    this.spacer.style.height = `${Math.max(total, 1) * ROW}px`;
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - 6);
    const last = Math.min(total, Math.ceil((this.body.scrollTop + this.body.clientHeight) / ROW) + 6);
    const made: HTMLElement[] = [];
    for (let at = first; at < last; at++) {
      const row = this.sorted[at];
      const line = h("div", {
        class: `vt-row ${this.rowClass(row)}${at === this.active ? " active" : ""}`, role: "row", "aria-rowindex": at + 2, id: `${this.id}-${row}`,
        "aria-selected": at === this.active ? "true" : "false",
        click: () => { this.active = at; this.draw(); this.open(row); },
      });
      line.style.transform = `translateY(${at * ROW}px)`;
      for (const column of this.columns) {
        const content = column.cell(row);
        const cell = h("div", { class: column.right ? "vt-cell right" : "vt-cell", role: "gridcell" }, content);
        if (typeof content === "string") cell.title = content;
        line.append(cell);
      }
      made.push(line);
    }
    this.spacer.replaceChildren(...made);
    const active = this.sorted[this.active];
    if (active !== undefined) this.element.setAttribute("aria-activedescendant", `${this.id}-${active}`);
  }

  private readonly id = `vt${Math.random().toString(36).slice(2, 8)}`;

  private intoView(): void {
    const top = this.active * ROW;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + ROW > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = top + ROW - this.body.clientHeight;
  }

  private key(event: KeyboardEvent): void {
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const moves: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      this.active = Math.max(0, Math.min(this.sorted.length - 1, this.active + moves[event.key]));
      this.intoView();
      this.draw();
    } else if (event.key === "Enter" && this.sorted.length) this.open(this.sorted[this.active]);
    else return;
    event.preventDefault();
  }
}

/** A short table with all its rows. */
export function plainTable(head: string[], rows: (Node | string)[][], right: number[] = [], label = ""): HTMLElement {
  const cell = (kind: "th" | "td", content: Node | string, at: number) => {
    const tag = kind === "th" && content === "" ? "td" : kind;
    return h(tag, { class: right.includes(at) ? "right" : null, scope: tag === "th" ? "col" : null }, content);
  };
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label || head.join(", ") },
    h("table", {},
      h("thead", {}, h("tr", {}, ...head.map((title, at) => cell("th", title, at)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((content, at) => cell("td", content, at)))))));
}
