/** What the parts of the page share: the data, the current view, and a way to change the view. */

import type { Module, Page, Site } from "./data";
import type { Theme } from "./colours";
import type { Found } from "./search";
import type { State } from "./state";

export interface App {
  page: Page;
  state: State;
  found: Found; // The result of the search.
  theme: Theme;
  go(change: Partial<State>, how?: "push" | "replace"): void;
}

/** The names of the runs and of their difference on the page. */
export function runNames(page: Page): string[] {
  const names = page.runs.map((run, number) => run.name || `run ${"AB"[number]}`);
  return names.length > 1 ? [...names, "difference"] : names;
}

/** Choose a site, or a module without sites. */
export function choose(app: App, module: Module, site: Site | null, how: "push" | "replace" = "push"): void {
  app.go({ site: site ? site.name : null, module: site ? null : module.path, tile: null }, how);
}

/** Choose a site by its number. */
export function chooseSite(app: App, number: number): void {
  const site = app.page.sites[number];
  if (site) app.go({ site: site.name, module: null, tile: null });
}

/** The part of a site's name after the path of its module: "/softmax", ":input[0]", or nothing. */
export function suffixOf(site: Site): string {
  const number = (call: number | string | null): string => (call === null ? "" : `#${call}`);
  const dot = site.path && site.member.endsWith("()") ? "." : "";
  const port = site.port === "output" ? "" : `:${site.port}`;
  return number(site.within) + dot + site.member + number(site.call) + port + site.index;
}

/** The module that a site belongs to. */
export function moduleOf(page: Page, site: Site): Module | null {
  return page.modules.find((module) => module.sites.includes(site.number)) ?? page.modules.find((module) => module.path === site.path) ?? null;
}
