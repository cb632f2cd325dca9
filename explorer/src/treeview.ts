/** The list of modules: only visible rows are in the page, so it stays fast with thousands of modules. */

import { choose, type App } from "./app";
import { spark } from "./histogram";
import { element, replace } from "./elements";
import { count } from "./numbers";
import type { Row, Tree } from "./tree";

const HEIGHT = 26; // The height of a row, the same as in style.css.
const BEYOND = 12; // How many rows are added above and below the visible ones.

export class TreeView {
  readonly element: HTMLElement;
  private readonly list = element("div", { class: "rows", role: "presentation" });
  private readonly inSight = element("div", { class: "in-sight", role: "presentation" });
  private rows: Row[] = [];
  private active = 0; // The row that the arrow keys are at.
  private shownFor = "";

  constructor(
    private readonly app: App,
    private readonly tree: Tree,
    private readonly warned: Map<string, string>, // The level of the most serious warning of each module.
  ) {
    this.list.append(this.inSight);
    this.element = element(
      "div",
      {
        class: "tree",
        id: "tree",
        role: "tree",
        tabindex: 0,
        "aria-label": "Modules",
        onscroll: () => this.draw(),
        onkeydown: (event: KeyboardEvent) => this.steer(event),
        onclick: (event: MouseEvent) => this.click(event),
      },
      this.list,
    );
  }

  /** Rebuild the rows after a search, a change of order, or a choice. */
  update(): void {
    const { state, found } = this.app;
    const chosen = this.chosenKey();
    const key = `${state.order} ${chosen}`;
    if (chosen && key !== this.shownFor) this.reveal(chosen);
    this.rows = this.tree.rows(found, state.order);
    const at = this.rows.findIndex((row) => row.key === chosen);
    if (at >= 0) this.active = at;
    this.active = Math.max(0, Math.min(this.active, this.rows.length - 1));
    this.list.style.setProperty("height", `${this.rows.length * HEIGHT}px`);
    if (at >= 0 && key !== this.shownFor) this.scrollTo(at, true);
    this.shownFor = key;
    this.draw();
  }

  /** Choose the next or the previous row that has a value. */
  step(by: 1 | -1): void {
    const chosen = this.rows.findIndex((row) => row.key === this.chosenKey());
    let at = chosen < 0 ? (by > 0 ? -1 : this.rows.length) : chosen;
    do at += by;
    while (this.rows[at] && (!this.rows[at]!.site || this.rows[at]!.faded));
    const row = this.rows[at];
    if (row) choose(this.app, row.module, row.site, "replace");
  }

  private reveal(chosen: string): void {
    const site = this.chosenSite();
    const path = site ? site.path : (this.app.state.module ?? "");
    this.tree.reveal(path, chosen.startsWith("site "));
  }

  private chosenSite() {
    const { page, state } = this.app;
    const site = page.sites.find((one) => one.name === state.site);
    return site && site.value !== null ? (page.sites[site.value] ?? site) : site;
  }

  private chosenKey(): string {
    const { state } = this.app;
    const site = this.chosenSite();
    if (!site) return state.module === null ? "" : `module ${state.module}`;
    const inRow = this.rows.find((row) => row.site === site);
    return inRow?.key ?? this.tree.rows(this.app.found, "calls").find((row) => row.site === site)?.key ?? "";
  }

  /** Put the visible rows into the page. */
  private draw(): void {
    const room = this.element.clientHeight || 800;
    const first = Math.max(0, Math.floor(this.element.scrollTop / HEIGHT) - BEYOND);
    const end = Math.min(this.rows.length, Math.ceil((this.element.scrollTop + room) / HEIGHT) + BEYOND);
    const chosen = this.chosenKey();
    const numbers = Array.from({ length: end - first }, (_, place) => first + place);
    if (this.active < first || this.active >= end) if (this.rows[this.active]) numbers.push(this.active);
    replace(this.inSight, numbers.map((number) => this.rowElement(number, chosen)));
    if (!this.rows.length) replace(this.inSight, element("p", { class: "empty" }, "Nothing is found."));
    this.element.setAttribute("aria-activedescendant", this.rows.length ? `row-${this.active}` : "");
  }

  private rowElement(number: number, chosen: string): HTMLElement {
    const row = this.rows[number]!;
    const { module, site } = row;
    const own = site?.stats.find(Boolean);
    const isSite = !row.key.startsWith("module");
    const level = isSite ? undefined : this.warned.get(module.path);
    const shape = site ? site.shape.join(" × ") : isSite ? "" : shapeText(module.shape);
    return element(
      "div",
      {
        id: `row-${number}`,
        class: ["row", row.faded && "faded", row.key === chosen && "chosen", number === this.active && "active", !site && "no-value"].filter(Boolean).join(" "),
        role: "treeitem",
        "aria-level": row.level,
        "aria-selected": String(row.key === chosen),
        "aria-expanded": row.children ? String(row.open) : null,
        "aria-posinset": number + 1,
        "aria-setsize": this.rows.length,
        "data-number": number,
        "data-name": row.key.startsWith("values ") ? null : (site?.name ?? module.path),
        title: [site?.name ?? module.path, module.type, site?.describe].filter(Boolean).join("\n"),
        style: { top: `${number * HEIGHT}px`, "--level": String(row.level - 1) },
      },
      element("span", { class: row.children ? "twist" : "twist none", "aria-hidden": "true" }, row.children ? (row.open ? "▾" : "▸") : ""),
      element("span", { class: isSite ? "name site-name" : "name" }, element("bdi", { dir: "ltr" }, row.label)),
      level ? element("span", { class: `dot ${level}`, title: `has a ${level}` }) : null,
      element("span", { class: "type" }, isSite ? "" : module.type),
      element("span", { class: "shape" }, shape),
      element("span", { class: "parameters" }, isSite ? "" : count(module.parameters)),
      element("span", { class: "sparkle", "aria-hidden": "true" }, own ? spark(site!.histogram) : null),
    );
  }

  private click(event: MouseEvent): void {
    const line = (event.target as Element).closest<HTMLElement>(".row");
    if (!line) return;
    const number = Number(line.dataset["number"]);
    const row = this.rows[number]!;
    this.active = number;
    const onTwist = (event.target as Element).classList.contains("twist");
    if (row.children && (onTwist || row.key.startsWith("values "))) this.turn(row, !row.open);
    else choose(this.app, row.module, row.site);
  }

  private turn(row: Row, open: boolean): void {
    this.tree.toggle(row, open);
    this.update();
  }

  /** The keys of a tree: up and down, right opens and enters, left closes and leaves, Enter chooses. */
  private steer(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const row = this.rows[this.active];
    if (!row) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / HEIGHT) - 1);
    const moves: Record<string, number> = {
      ArrowDown: this.active + 1,
      ArrowUp: this.active - 1,
      Home: 0,
      End: this.rows.length - 1,
      PageDown: this.active + page,
      PageUp: this.active - page,
    };
    if (event.key in moves) this.moveTo(moves[event.key]!);
    else if (event.key === "ArrowRight") row.children && !row.open ? this.turn(row, true) : row.children && this.moveTo(this.active + 1);
    else if (event.key === "ArrowLeft") row.open ? this.turn(row, false) : this.moveTo(this.parentOf(this.active));
    else if ((event.key === "Enter" || event.key === " ") && row.key.startsWith("values ")) this.turn(row, !row.open);
    else if (event.key === "Enter" || event.key === " ") choose(this.app, row.module, row.site);
    else return;
    event.preventDefault();
  }

  private parentOf(number: number): number {
    const level = this.rows[number]!.level;
    for (let at = number - 1; at >= 0; at -= 1) if (this.rows[at]!.level < level) return at;
    return number;
  }

  private moveTo(number: number): void {
    this.active = Math.max(0, Math.min(this.rows.length - 1, number));
    this.scrollTo(this.active);
    this.draw();
  }

  /** Scroll a row into view: to the edge, or to the middle after a jump. */
  private scrollTo(number: number, jump = false): void {
    const [top, room, from] = [number * HEIGHT, this.element.clientHeight, this.element.scrollTop];
    if (!room || (top >= from && top + HEIGHT <= from + room)) return;
    const edge = top < from ? top : top + HEIGHT - room;
    this.element.scrollTop = jump ? top - room / 2 : edge;
  }
}

/** The text of a shape in a row; of several shapes, the first. */
function shapeText(shape: string): string {
  const [first = "", more] = shape.split("), ");
  return first.replace(/[()]/g, "").replace(/,$/, "").replaceAll(", ", " × ") + (more ? ", …" : "");
}
