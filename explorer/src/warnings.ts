/** Warnings as the page shows them: once if both runs have the same, and with a link to all places concerned. */

import { chooseSite, runNames, type App } from "./app";
import type { Module, Page, Warning } from "./data";
import { element } from "./elements";
import { plural } from "./numbers";
import { RUN } from "./panels";

/** A warning, and the runs that have it. */
export interface Said extends Warning {
  runs: number[];
}

/** The warnings of the page; a warning that both runs have is listed once. */
export function warningsOf(page: Page): Said[] {
  const found = new Map<string, Said>();
  for (const warning of page.warnings) {
    const text = named(warning.text);
    const key = [warning.level, warning.what, warning.site, warning.module, text].join("\n");
    const same = found.get(key);
    if (same) same.runs.push(warning.run);
    else found.set(key, { ...warning, text, runs: [warning.run] });
  }
  return [...found.values()];
}

/** How many there are: "1 error, 2 warnings and 3 notes". */
export function countOf(warnings: Said[]): string {
  const counts = (["error", "warning", "note"] as const).map((level) => [level, warnings.filter((one) => one.level === level).length] as const);
  const parts = counts.filter(([, number]) => number).map(([level, number]) => plural(number, level));
  return parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : (parts[0] ?? "no warnings");
}

/** One warning as a line; with `linked`, its text links to its place. */
export function warningLine(app: App, warning: Said, linked: boolean): HTMLElement {
  const go = (): void => {
    if (warning.site !== null) chooseSite(app, warning.site);
    else app.go({ site: null, module: warning.module, tile: null });
  };
  const there = linked && ((warning.site !== null && app.page.sites[warning.site]) || app.page.modules.some((module) => module.path === warning.module));
  const text = there ? element("button", { class: "link", onclick: go }, warning.text) : element("span", {}, warning.text);
  const what = linked ? element("span", { class: "what" }, warning.what) : null;
  return element("li", { class: warning.level }, element("span", { class: `dot ${warning.level}` }), what, text, othersOf(app, warning), runOf(app.page, warning));
}

/** The level of the most serious warning of each module, for the dots in the tree. */
export function gravest(page: Page): Map<string, string> {
  const levels = new Map<string, string>();
  for (const warning of page.warnings) {
    const path = warning.site === null ? warning.module : (page.sites[warning.site]?.path ?? null);
    if (path !== null && !levels.has(path)) levels.set(path, warning.level); // The most serious come first.
    for (const module of alike(page, warning)) if (!levels.has(module.path)) levels.set(module.path, warning.level);
  }
  return levels;
}

/** Replace an empty name by "model", as the tree calls it. */
function named(text: string): string {
  return text.replace(/(^|[\s(])'(?=[:[#'])/g, "$1'model");
}

/** If one warning stands for many layers, a button that searches for all of them. */
function othersOf(app: App, warning: Said): HTMLElement | null {
  const modules = alike(app.page, warning);
  if (modules.length < 2) return null;
  return element("button", { class: "quiet others", onclick: () => app.go({ search: open(warning.module!) }) }, `find all ${modules.length}`);
}

function runOf(page: Page, warning: Said): HTMLElement | null {
  if (page.runs.length < 2 || warning.site === null) return null;
  const name = warning.runs.length > 1 ? "both runs" : (runNames(page)[warning.runs[0]!] ?? "");
  return element("span", { class: "run-name" }, warning.runs.map((run) => element("span", { class: `swatch ${RUN[run] ?? ""}` })), name);
}

/** The modules of a "never called" warning, which names only the first of a family. */
function alike(page: Page, warning: Warning): Module[] {
  const path = warning.module;
  if (warning.what !== "never" || path === null) return [];
  return page.modules.filter((module) => open(module.path) === open(path) && (module.hazards ?? []).some((hazard) => hazard.startsWith("never called")));
}

/** A name with `*` in place of its numbers. */
function open(path: string): string {
  return path.replace(/\d+/g, "*");
}
