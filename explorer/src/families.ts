/** Sites that belong together: the same place in each of many layers. */

import type { App } from "./app";
import type { Page, Site } from "./data";

const MOST = 0.5; // The share of all sites that the layers of a family need to stand for the model.
const MOST_PARTS = 60; // The most parts of a model on one chart.

export interface Family {
  pattern: string;
  sites: Site[];
}

/** The patterns that match a place in several layers, the broadest first. */
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

/** The sites to draw over depth: the search results; without a search, the broadest family if it is most of the model, or else the model's parts. */
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
  return inOrder(family && family.sites.length > 2 && shareOf(family, values) >= MOST ? family.sites : partsOf(values));
}

/** The sites with floating-point values: integers, such as indices, have no size that grows over depth. If there are none, all sites. */
export function withoutIntegers(sites: Site[]): Site[] {
  const real = sites.filter((site) => /float|complex/.test(site.dtype));
  return real.length ? real : sites;
}

/** The first tensor of each value: a line through all tensors would jump between quantities of different size. */
export function firstTensors(sites: Site[]): Site[] {
  const first = new Map<string, Site>();
  for (const site of sites) {
    const key = [site.path, site.within, site.member, site.call, site.port, ownIndex(site)].join(" ");
    if (!first.has(key)) first.set(key, site);
  }
  return [...first.values()];
}

/** The subscripts of a site without those that select a tensor in its value. */
function ownIndex(site: Site): string {
  const added = site.parts.map(([key]) => (typeof key === "string" ? `["${key.replace(/[\\"]/g, "\\$&")}"]` : `[${key}]`)).join("");
  return site.index.slice(0, site.index.length - added.length);
}

/** The share of the values that are inside the layers of a family. */
function shareOf(family: Family, values: Site[]): number {
  const paths = new Set(family.sites.map((site) => site.path));
  const within = (path: string): boolean => path !== "" && (paths.has(path) || within(path.slice(0, Math.max(0, path.lastIndexOf(".")))));
  return values.filter((site) => within(site.path)).length / values.length;
}

/** The outputs of modules at the greatest depth that fits on a chart: a module is left out if modules inside it are shown. */
function partsOf(values: Site[]): Site[] {
  const outputs = values.filter((site) => site.port === "output" && !site.member && site.path !== "");
  const depthOf = (site: Site): number => site.path.split(".").length;
  const above = new Set(outputs.flatMap((site) => parentsOf(site.path)));
  const cut = (depth: number): Site[] => outputs.filter((site) => depthOf(site) === depth || (depthOf(site) < depth && !above.has(site.path)));
  const deepest = Math.max(0, ...outputs.map(depthOf));
  const cuts = Array.from({ length: deepest }, (_, depth) => cut(depth + 1)).filter((sites) => sites.length > 2);
  return cuts.findLast((sites) => sites.length <= MOST_PARTS) ?? cuts[0] ?? values;
}

function parentsOf(path: string): string[] {
  const names = path.split(".");
  return names.slice(1).map((_, depth) => names.slice(0, depth + 1).join("."));
}

/** The names of sites without their common beginning. */
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
