// Histograms of both sides and of the error, heat maps, the worst elements.

import { bytes, Picture } from "./data";
import { exact, h, name, number, s, whole } from "./dom";
import { plainTable } from "./table";
import { t } from "./words";

const WIDE = 300, HIGH = 110;

export function pictureOf(picture: Picture): HTMLElement {
  const box = h("div", { class: "picture" }, h("h4", {}, name(picture.tensor), picture.shape ? ` [${picture.shape.join(", ")}]` : ""));
  if (picture.problem) {
    box.append(h("p", { class: "note warn" }, picture.problem));
    return box;
  }
  if (picture.steps) {
    const at = picture.steps.findIndex((step) => step > 1);
    box.append(h("p", { class: "sub" }, t("sampled", { n: picture.steps[at], d: t("dimension", { n: at }) })));
  }
  if (picture.disagree) box.append(h("p", { class: "note warn" }, t("disagree", { n: whole(picture.disagree) })));
  const charts = h("div", { class: "charts" });
  if (picture.histogram) charts.append(histogram(picture.histogram));
  if (picture.errors) charts.append(picture.errors.counts ? errorHistogram(picture.errors) : h("p", { class: "sub" }, t("allEqual")));
  if (picture.maps) charts.append(heatMap(picture.maps));
  box.append(charts);
  if (picture.worst?.length) {
    const rows = picture.worst.map(([at, ours, theirs]) => [
      `[${at.join(", ")}]`, exact(ours), exact(theirs), typeof ours === "number" && typeof theirs === "number" ? number(ours - theirs) : ""]);
    box.append(h("h5", {}, t("worst")), plainTable([t("position"), t("actual"), t("expected"), t("difference")], rows, [1, 2, 3], t("worst")));
  }
  return box;
}

function bars(counts: number[], most: number, className: string): SVGElement {
  const group = s("g", { class: className });
  const wide = WIDE / counts.length;
  counts.forEach((count, at) => {
    if (!count) return;
    const height = Math.max(1, (Math.log1p(count) / Math.log1p(most)) * HIGH);
    group.append(s("rect", { x: at * wide, y: HIGH - height, width: Math.max(wide - 0.5, 0.5), height }));
  });
  return group;
}

function frame(title: string, low: string, high: string, ...inside: SVGElement[]): HTMLElement {
  return h("figure", {},
    h("figcaption", {}, title),
    s("svg", { viewBox: `0 0 ${WIDE} ${HIGH + 16}`, role: "img", "aria-label": `${title}: ${low} … ${high}`, class: "chart" },
      ...inside, s("line", { x1: 0, y1: HIGH, x2: WIDE, y2: HIGH, class: "axis" }),
      s("text", { x: 0, y: HIGH + 13 }, low), s("text", { x: WIDE, y: HIGH + 13, "text-anchor": "end" }, high)));
}

function histogram(found: NonNullable<Picture["histogram"]>): HTMLElement {
  const [ours, theirs] = found.counts;
  const most = Math.max(1, ...(ours ?? []), ...(theirs ?? []));
  const inside: SVGElement[] = [];
  if (theirs) inside.push(bars(theirs, most, "expected"));
  if (ours) inside.push(bars(ours, most, theirs ? "actual outline" : "actual"));
  const title = h("span", {}, t("histogram"), theirs && ours ? h("span", { class: "key" }, h("i", { class: "key-actual" }), ` ${t("actual")} `, h("i", { class: "key-expected" }), ` ${t("expected")}`) : "");
  const made = frame(t("histogram"), number(found.low), number(found.high), ...inside);
  made.querySelector("figcaption")!.replaceChildren(title);
  return made;
}

function errorHistogram(found: NonNullable<Picture["errors"]>): HTMLElement {
  const counts = found.counts!;
  const most = Math.max(1, ...counts);
  return frame(`${t("errorHistogram")}${found.equal ? ` (${t("equalBits")}: ${whole(found.equal)})` : ""}`, `1e${found.low}`, `1e${found.high}`, bars(counts, most, "error"));
}

/** From pale to dark; also told apart in grey, and by people who do not see red or green. */
function shade(level: number): [number, number, number] {
  const stops: [number, number, number][] = [[255, 247, 214], [254, 196, 79], [217, 95, 14], [127, 31, 20], [50, 8, 30]];
  const at = (level / 255) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return [0, 1, 2].map((c) => Math.round(stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (at - low))) as [number, number, number];
}

function heatMap(maps: NonNullable<Picture["maps"]>): HTMLElement {
  const keys = Object.keys(maps.of);
  const canvas = h("canvas", { class: "heat", role: "img" });
  const words = h("div", { class: "sub heat-words" });
  const draw = (key: string): void => {
    const [rows, columns, text] = maps.of[key];
    const levels = bytes(text);
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d")!;
    const image = context.createImageData(columns, rows);
    levels.forEach((level, at) => {
      const [r, g, b] = level ? shade(level) : [235, 237, 240];
      image.data.set([r, g, b, 255], at * 4);
    });
    context.putImageData(image, 0, 0);
    const [i, j] = key.split(",").map(Number);
    const dimension = (n: number) => (maps.shape.length === 2 && maps.shape[0] === 1 && maps.folded === 0 && n === 0 ? "" : `${t("dimension", { n: n + maps.folded })} (${maps.shape[n]})`);
    words.textContent = `↓ ${dimension(i)}  → ${dimension(j)} · max ${number(maps.top)}`;
    canvas.setAttribute("aria-label", `${t("heatMap")}: ${words.textContent}`);
    canvas.style.aspectRatio = `${Math.min(4, Math.max(0.5, columns / rows))}`;
  };
  const values = (key: string, event: MouseEvent): void => {
    const [rows, columns, text] = maps.of[key];
    const box = canvas.getBoundingClientRect();
    const x = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns));
    const y = Math.min(rows - 1, Math.floor(((event.clientY - box.top) / box.height) * rows));
    const level = bytes(text)[y * columns + x];
    const [i, j] = key.split(",").map(Number);
    const place = (n: number, at: number, cells: number) => { const from = Math.floor((at * maps.shape[n]) / cells), to = Math.floor(((at + 1) * maps.shape[n]) / cells) - 1; return from >= to ? `${from}` : `${from}–${to}`; };
    canvas.title = `[${place(i, y, rows)}, ${place(j, x, columns)}]: ${level ? number(maps.top * 10 ** (((level - 255) / 254) * maps.decades)) : t("equalBits")}`;
  };
  const choose = h("select", { "aria-label": t("dimensions"), change: () => draw(choose.value) }, ...keys.map((key) => h("option", { value: key }, key.split(",").map((d) => t("dimension", { n: Number(d) + maps.folded })).join(" × "))));
  choose.value = keys[keys.length - 1];
  canvas.addEventListener("mousemove", (event) => values(choose.value, event));
  draw(choose.value);
  return h("figure", {}, h("figcaption", {}, t("heatMap"), keys.length > 1 ? h("span", {}, " ", choose) : null), canvas, words);
}
