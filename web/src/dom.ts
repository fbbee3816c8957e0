// Elements made of text: nothing here takes markup, so no data can become any.

import { currentLanguage, sentence } from "./words";

type Child = Node | string | number | null | undefined | false;
type Props = Record<string, string | number | boolean | null | undefined | ((event: any) => void)>;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, props: Props, children: Child[]): void {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, props, children);
  return element;
}

export function s<K extends keyof SVGElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  fill(element, props, children);
  return element;
}

export function clear(element: Element): void {
  element.replaceChildren();
}

/** A name that came from a file: kept apart from the text around it, whatever letters it has. */
export function name(text: string, more: Props = {}): HTMLElement {
  return h("bdi", { class: "name", ...more }, text);
}

/** A sentence of the report, in the language of the page; a screen reader is told where that is another one. */
export function said(text: string, more: Props = {}): HTMLElement {
  const shown = sentence(text);
  return h("bdi", { class: "text", lang: shown === text && currentLanguage() === "zh" ? "en" : null, ...more }, shown);
}

export function download(filename: string, type: string, text: string): void {
  const link = h("a", { href: `data:${type};charset=utf-8,${encodeURIComponent(text)}`, download: filename });
  link.click();
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // a page of a file share may not use the clipboard: the old way still works there
    const area = h("textarea", { readonly: true, "aria-hidden": "true", class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

let announcer: HTMLElement | null = null;

/** Tell a screen reader. */
export function announce(text: string): void {
  if (announcer === null || !announcer.isConnected) {
    announcer = h("div", { class: "offscreen", role: "status", "aria-live": "polite" });
    document.body.append(announcer);
  }
  announcer.textContent = text;
}

export function number(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size >= 100 && size < 1e6) return Math.round(value).toLocaleString("en-US");
  const short = Number(value.toPrecision(3));
  return size >= 1e6 || (size > 0 && size < 1e-3) ? short.toExponential().replace("e+", "e") : String(short);
}

/** As many digits as tell two numbers apart. */
export function exact(value: number | string | null): string {
  if (value === null) return "";
  if (typeof value === "string") return value;
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  return String(Number(value.toPrecision(7)));
}

export const whole = (value: number): string => value.toLocaleString("en-US");
