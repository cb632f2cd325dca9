/** Find the text of the search box: as a pattern of the site language, or else as a part of a name. */

import { meansCalls } from "./calls";
import type { Page, Site } from "./data";
import { matchesMember, matchesPath, matchesSubscripts } from "./matching";
import { parse, SiteError, subscriptsOf, type Pattern } from "./sites";

type Place = Pick<Site, "path" | "port" | "member" | "index" | "call" | "within" | "parts">;

/** The sites and modules that a text matches, and how the text was understood. */
export interface Found {
  how: "all" | "pattern" | "text";
  sites: Set<number>;
  modules: Set<number>;
  note: string;
}

/** Find the sites and modules that a text matches. */
export function find(page: Page, text: string): Found {
  const wanted = text.trim();
  if (!wanted) return { how: "all", sites: all(page.sites), modules: all(page.modules), note: "" };
  let why = "matches nothing as a pattern";
  try {
    const found = findPattern(page, parse(wanted));
    if (found.sites.size || found.modules.size) return found;
  } catch (error) {
    if (!(error instanceof SiteError)) throw error;
    why = `is no pattern (${error.message})`;
  }
  return findText(page, wanted, why);
}

/** Find the sites that a pattern matches, as Cache.select does; a module without a value is found by its name. */
export function findPattern(page: Page, pattern: Pattern): Found {
  const sites = new Set<number>();
  for (const site of page.sites) if (meant(pattern, site)) sites.add(site.number);
  const modules = new Set<number>();
  for (const module of page.modules) {
    const output = { path: module.path, port: "output", member: "", index: "", call: null, within: null, parts: [] };
    if (meant(pattern, output)) modules.add(module.number);
  }
  if (!sites.size && !modules.size) addTied(page, pattern, sites, modules);
  return { how: "pattern", sites, modules, note: "" };
}

/** Whether a pattern matches this place, or a part of its value. */
function meant(pattern: Pattern, place: Place): boolean {
  if (pattern.port !== place.port || !matchesPath(pattern, place.path)) return false;
  if (!meansCalls(pattern.call, place.call) || !meansCalls(pattern.within, place.within)) return false;
  return matchesMember(place.member, pattern.member) && matchesSubscripts(pattern.subscripts, subscriptsOf(place.index), place.parts);
}

/** Add a tied module that the pattern names by another of its names. */
function addTied(page: Page, pattern: Pattern, sites: Set<number>, modules: Set<number>): void {
  const tied = page.modules.find((module) => pattern.path !== null && (module.also ?? []).includes(pattern.path));
  if (!tied) return;
  const there = { ...pattern, path: tied.path };
  for (const number of tied.sites) if (meant(there, page.sites[number]!)) sites.add(number);
  if (pattern.port === "output" && !pattern.member && pattern.call === null) modules.add(tied.number);
}

function findText(page: Page, text: string, why: string): Found {
  const part = text.toLowerCase();
  const has = (...texts: string[]): boolean => texts.some((one) => one.toLowerCase().includes(part));
  const sites = page.sites.filter((site) => has(site.name));
  const modules = page.modules.filter((module) => has(module.path, module.type, ...(module.also ?? [])));
  return { how: "text", sites: all(sites), modules: all(modules), note: why };
}

function all(things: { number: number }[]): Set<number> {
  return new Set(things.map((thing) => thing.number));
}
