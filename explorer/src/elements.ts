/** Elements of the page. Text is inserted as text only: a module's name is never parsed as HTML. */

export type Child = Node | string | null | undefined | false | Child[];
type Listener = (event: never) => void;
export type Attributes = Record<string, string | number | boolean | null | undefined | Listener | Record<string, string>>;

/** Make an element: `element("button", { class: "quiet", onclick: act }, "Expand")`. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  dress(made, attributes);
  fill(made, children);
  return made;
}

/** Make an element of a drawing (SVG). */
export function drawn<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  dress(made, attributes);
  fill(made, children);
  return made;
}

/** Replace the children of an element. */
export function replace(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  fill(parent, children);
}

function dress(made: HTMLElement | SVGElement, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value as EventListener);
    else if (typeof value === "object") Object.entries(value).forEach(([key, text]) => made.style.setProperty(key, text));
    else made.setAttribute(name, value === true ? "" : String(value));
  }
}

function fill(parent: Element, children: Child[]): void {
  for (const child of children) {
    if (Array.isArray(child)) fill(parent, child);
    else if (child) parent.append(child);
  }
}
