/** The page: a header, the tree of modules, and the chosen site or the overview. */

import { runNames, type App } from "./app";
import { PageError, readPage, type Page } from "./data";
import { element, replace } from "./elements";
import { familiesOf } from "./families";
import { listen, showHelp } from "./keys";
import { count, plural } from "./numbers";
import { overview } from "./overview";
import { RUN } from "./panels";
import { find, findPattern } from "./search";
import { modulePage, sitePage, type Drawn } from "./sitepage";
import { parse, SiteError } from "./sites";
import { read, write, type State } from "./state";
import { themeNow, turnTheme, wearTheme } from "./theme";
import { hideTip, placeTip } from "./tip";
import { Tree } from "./tree";
import { TreeView } from "./treeview";
import { countOf, gravest, warningsOf } from "./warnings";

const SOON = 120; // Milliseconds. Browsers ignore a page that changes its address too often.

function start(): void {
  const root = document.getElementById("page")!;
  wearTheme(() => undefined);
  try {
    const page = readPage(document.getElementById("hookline-data")?.textContent);
    document.title = `${page.title || "hookline"} · hookline`;
    new Explorer(page, root).begin();
  } catch (error) {
    if (!(error instanceof PageError)) console.error(error);
    replace(root, failure(error as Error));
  }
}

/** The message that is shown instead of a blank page. */
function failure(error: Error): HTMLElement {
  const text = error instanceof PageError ? error.message : `Something in this page's data was not expected (${error.message}).`;
  return element("div", { class: "failure", role: "alert" }, element("h2", {}, "This can't be shown"), element("p", {}, text));
}

class Explorer implements App {
  state: State = read(location.hash);
  found;
  theme = themeNow();
  private view: Drawn = { element: element("div"), draw: () => undefined };
  private written = "";
  private wroteAt = -Infinity;
  private waiting = 0;
  private readonly tree: Tree;
  private readonly treeView: TreeView;
  private readonly main = element("main", { id: "main", tabindex: -1 });
  private readonly status = element("p", { class: "search-status", role: "status" });
  private readonly input = element("input", {
    type: "search",
    id: "search",
    "aria-label": "Search sites by a pattern or a part of a name",
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => this.go({ search: this.input.value }, "replace"),
    onkeydown: (event: KeyboardEvent) => this.searchKey(event),
  });

  constructor(
    readonly page: Page,
    private readonly root: HTMLElement,
  ) {
    this.found = find(page, this.state.search);
    this.input.placeholder = `${familiesOf(page)[0]?.pattern ?? "h.*.mlp"}, or any part of a name`;
    this.tree = new Tree(page);
    this.treeView = new TreeView(this, this.tree, gravest(page));
  }

  /** Put the page together and show the view in the address. */
  begin(): void {
    replace(this.root, this.header(), element("div", { class: "body" }, this.sidebar(), this.main));
    placeTip();
    wearTheme(() => this.redress());
    listen({
      search: () => this.input.select(),
      back: () => this.back(),
      next: () => this.treeView.step(1),
      previous: () => this.treeView.step(-1),
      difference: () => this.go({ view: this.state.view === "difference" ? "all" : "difference" }),
      beside: () => this.go({ view: "all" }),
      gradient: () => this.go({ gradient: !this.state.gradient }, "replace"),
      tree: () => this.treeView.element.focus(),
      theme: () => this.turn(),
    });
    window.addEventListener("hashchange", () => location.hash.replace(/^#/, "") !== this.written && this.become(read(location.hash)));
    new ResizeObserver(() => this.resized()).observe(this.main);
    this.written = location.hash.replace(/^#/, "");
    this.become(this.state);
    performance.mark("hookline ready");
    Object.assign(window, { hookline: { matches: (text: string) => matches(this.page, text) } }); // For tests, and for the browser's console.
  }

  /** Change the view, and the address with it. */
  go(change: Partial<State>, how: "push" | "replace" = "push"): void {
    const next = { ...this.state, ...change };
    this.become(next);
    window.clearTimeout(this.waiting);
    const soon = how === "replace" && performance.now() - this.wroteAt < SOON;
    if (soon) this.waiting = window.setTimeout(() => this.writeAddress("replace"), SOON);
    else this.writeAddress(how);
  }

  private writeAddress(how: "push" | "replace"): void {
    const there = `#${write(this.state)}`;
    if (how === "push") location.hash = there;
    else location.replace(there);
    this.written = location.hash.replace(/^#/, "");
    this.wroteAt = performance.now();
  }

  private become(state: State): void {
    const searched = state.search !== this.state.search;
    const moved = state.site !== this.state.site || state.module !== this.state.module;
    this.state = state;
    if (searched || this.input.value !== state.search) {
      this.found = find(this.page, state.search);
      if (this.input.value !== state.search) this.input.value = state.search;
    }
    this.treeView.update();
    this.say();
    this.render(moved);
  }

  private render(moved: boolean): void {
    hideTip();
    const focused = (document.activeElement as HTMLElement | null)?.dataset?.["key"];
    try {
      this.view = this.chosen();
      replace(this.main, this.view.element);
      this.view.draw();
    } catch (error) {
      if (!(error instanceof PageError)) console.error(error);
      replace(this.main, failure(error as Error));
    }
    if (moved) this.main.scrollTop = 0;
    const again = focused && [...this.main.querySelectorAll<HTMLElement>("[data-key]")].find((one) => one.dataset["key"] === focused);
    if (again) again.focus();
  }

  private chosen(): Drawn {
    const { site: name, module: path } = this.state;
    const site = name === null ? undefined : this.page.sites.find((one) => one.name === name);
    if (site) return sitePage(this, site);
    const module = path === null ? undefined : this.page.modules.find((one) => one.path === path);
    if (module) return modulePage(this, module);
    if (name !== null || path !== null) throw new PageError(`There is no “${name ?? path}” on this page. Esc shows all there is.`);
    return overview(this);
  }

  /** Go back one step: from an enlarged tile to all tiles, from a site to the overview, from a search to everything. */
  private back(): void {
    hideTip();
    if (this.state.tile !== null) this.go({ tile: null });
    else if (document.activeElement === this.input && this.state.search) this.go({ search: "" }, "replace");
    else if (this.state.site !== null || this.state.module !== null) this.go({ site: null, module: null });
    else if (this.state.search) this.go({ search: "" });
    else (document.activeElement as HTMLElement | null)?.blur();
  }

  private searchKey(event: KeyboardEvent): void {
    if (event.key === "ArrowDown") this.treeView.element.focus();
    else if (event.key === "Enter") this.enter();
    else return;
    event.preventDefault();
  }

  /** Show the site that the search found, or all of them over depth if there are several. */
  private enter(): void {
    const values = [...this.found.sites].map((number) => this.page.sites[number]!).filter((site) => site.value === null);
    this.go(values.length === 1 ? { site: values[0]!.name, module: null } : { site: null, module: null });
  }

  private say(): void {
    const { found } = this;
    const sites = plural(found.sites.size, "site");
    const texts = {
      all: `${sites} in ${plural(this.page.modules.length, "module")}`,
      pattern: found.sites.size ? `pattern: ${sites}` : `pattern: ${plural(found.modules.size, "module")}, nothing captured`,
      text: `${found.note}; names with this text: ${sites}`,
    };
    replace(this.status, texts[found.how], found.sites.size || found.modules.size ? null : this.suggestion());
    this.status.className = `search-status ${found.how}${found.sites.size || found.modules.size ? "" : " nothing"}`;
  }

  /** Readers often forget how a name begins: offer the pattern that matches the text at any depth. */
  private suggestion(): HTMLElement | null {
    const deeper = `**.${this.state.search.trim()}`;
    const { how, sites } = find(this.page, deeper);
    if (how !== "pattern" || !sites.size) return null;
    return element("button", { class: "link", onclick: () => this.go({ search: deeper }) }, `${deeper} means ${plural(sites.size, "site")}`);
  }

  private header(): HTMLElement {
    const { page } = this;
    const parameters = page.modules.find((module) => module.path === "")?.parameters ?? null;
    const totals = [plural(page.modules.length, "module"), plural(page.sites.length, "site"), parameters ? `${count(parameters)} parameters` : ""];
    const warnings = warningsOf(page);
    const grave = warnings.filter((warning) => warning.level !== "note");
    const worst = warnings[0]?.level ?? "note"; // The most serious warning comes first.
    const home = (): void => this.go({ site: null, module: null, tile: null });
    return element(
      "header",
      { class: "top" },
      element("button", { class: "brand", onclick: home, title: "Overview" }, "hookline"),
      element("h1", { title: page.title || "Explorer" }, page.title || "Explorer"),
      page.runs.length > 1 ? element("span", { class: "runs" }, runNames(page).slice(0, 2).map((name, run) => element("span", { title: name }, element("span", { class: `swatch ${RUN[run]}` }), element("span", { class: "cut" }, name)))) : null,
      element("span", { class: "totals" }, totals.filter(Boolean).join(" · ")),
      element("span", { class: "made", title: `hookline ${page.version}` }, page.made),
      warnings.length ? element("button", { class: `badge ${worst}`, onclick: home, title: countOf(warnings) }, element("span", { class: `dot ${worst}` }), countOf(grave.length ? grave : warnings)) : null,
      element("button", { class: "icon", onclick: () => this.turn(), "aria-label": "Light or dark", title: "Light or dark (l)" }, "◐"),
      element("button", { class: "icon", onclick: showHelp, "aria-label": "Help", title: "Keys and patterns (?)" }, "?"),
    );
  }

  private sidebar(): HTMLElement {
    const order = (to: "tree" | "calls", label: string): HTMLElement => {
      const button = element("button", { "aria-pressed": String(this.state.order === to), onclick: () => { this.go({ order: to }, "replace"); press(); } }, label);
      button.dataset["order"] = to;
      return button;
    };
    const orders = element("div", { class: "segments small", role: "group", "aria-label": "Order" }, order("tree", "tree"), order("calls", "call order"));
    const press = (): void => orders.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset["order"] === this.state.order)));
    const all = (open: boolean) => (): void => { this.tree.toggleAll(open); this.treeView.update(); };
    return element(
      "nav",
      { class: "side", "aria-label": "Modules" },
      element("div", { class: "search" }, this.input, this.status),
      element("div", { class: "tools" }, orders, element("button", { class: "quiet", onclick: all(true) }, "open all"), element("button", { class: "quiet", onclick: all(false) }, "close all")),
      this.treeView.element,
    );
  }

  private width = 0;

  private resized(): void {
    if (this.main.clientWidth === this.width) return;
    this.width = this.main.clientWidth;
    this.view.draw();
    this.treeView.update();
  }

  private turn(): void {
    turnTheme();
    this.redress();
  }

  private redress(): void {
    this.theme = themeNow();
    this.view.draw();
  }
}

/** The names of the sites that a pattern matches; null if the text is not a pattern. */
function matches(page: Page, text: string): string[] | null {
  try {
    return [...findPattern(page, parse(text)).sites].map((number) => page.sites[number]!.name);
  } catch (error) {
    if (error instanceof SiteError) return null;
    throw error;
  }
}

start();
