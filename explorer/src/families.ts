/** Sites that belong together: the same place in each of many layers. */

import type { App } from "./app";
import type { Page, Site } from "./data";

export interface Family {
  pattern: string;
  sites: Site[];
}

/** The patterns that name a place in several layers, the broadest first. */
export function familiesOf(page: Page): Family[] {
  const families = new Map<string, Site[]>();
  for (const site of page.sites) {
    if (site.value !== null || site.port !== "output" || site.call !== null || !/(^|\.)\d+(\.|$)/.test(site.path)) continue;
    const pattern = patternOf(site);
    families.set(pattern, [...(families.get(pattern) ?? []), site]);
  }
  const found = [...families].map(([pattern, sites]) => ({ pattern, sites })).filter(({ sites }) => sites.length > 1);
  const depth = (pattern: string): number => pattern.split(".").length + (pattern.match(/[/[]/g) ?? []).length;
  return found.toSorted((one, other) => depth(one.pattern) - depth(other.pattern) || other.sites.length - one.sites.length);
}

/** The sites that are drawn over depth: those found, or the broadest family when nothing is searched for. */
export function depthSites(app: App): Site[] {
  const { page, found } = app;
  const values = page.sites.filter((site) => site.value === null && site.stats.some(Boolean));
  const inOrder = (sites: Site[]): Site[] => sites.toSorted((one, other) => one.order - other.order);
  if (found.how !== "all") {
    const matching = values.filter((site) => found.sites.has(site.number));
    const gradients = page.sites.filter((site) => site.value !== null && found.sites.has(site.number) && site.stats.some(Boolean));
    return inOrder(matching.length ? matching : gradients);
  }
  const family = familiesOf(page)[0];
  return inOrder(family && family.sites.length > 2 ? family.sites : values);
}

/** The names of sites without what all of them begin with. */
export function shortNames(sites: Site[]): string[] {
  const names = sites.map((site) => site.name || "model");
  const paths = names.map((name) => name.split("."));
  let shared = 0;
  while (paths.length > 1 && paths.every((path) => path.length > shared + 2 && path[shared] === paths[0]![shared])) shared += 1;
  return paths.map((path) => path.slice(shared).join("."));
}

function patternOf(site: Site): string {
  const path = site.path.split(".").map((name) => (/^\d+$/.test(name) ? "*" : name)).join(".");
  return path + site.member + site.index;
}
