/** The data of the page: one JSON text that hookline wrote into it. It is checked and read here, once. */

export interface Stats {
  mean: number;
  std: number;
  min: number;
  max: number;
  norm: number;
  rms: number;
  abs: number;
  zeros: number;
  nan: number;
  inf: number;
  dead: number | null;
  elements: number;
}

export interface Histogram {
  low: number;
  high: number;
  counts: number[];
}

/** A value as one-byte codes; `picture.ts` turns them into numbers. */
export interface Packed {
  shape: number[];
  of: number[];
  pick: [start: number, count: number, step: number][];
  left_out: string;
  levels: string;
  codes: string;
  error: number;
}

/** A statistic for each token of each sample shown. */
export type ByToken = Record<string, unknown[][]>;

/** Statistics of a site in several calls. */
export interface OverCalls {
  along: string; // "step" if the calls are the steps of a generation.
  numbers: number[]; // The calls that are listed, out of `of`.
  of: number;
  joined: boolean; // Whether the value is that of all calls, joined to one sequence; else it is the latest.
  stats: Record<string, number[]>;
}

export interface Site {
  number: number; // The site's index in the list of sites.
  name: string;
  path: string;
  port: string;
  member: string;
  index: string;
  parts: (number | string)[][]; // For each subscript that selects this tensor in its value, all ways to write it.
  call: number | string | null; // Several calls as they are written, without the `#`.
  within: number | string | null;
  order: number;
  kind: string;
  dtype: string;
  shape: number[];
  describe: string;
  gradient: number | null; // The site of this value's gradient.
  value: number | null; // The site of the value that this is the gradient of.
  calls: number[];
  over: (OverCalls | null)[]; // Of run A and of run B, if several calls were kept.
  stats: (Stats | null)[]; // Of run A, of run B, and of their difference, as in the next three fields.
  histogram: (Histogram | null)[];
  tokens: (ByToken | null)[] | null;
  picture: (Packed | null)[];
}

export interface Module {
  number: number;
  path: string;
  type: string;
  parameters: number | null;
  own: number | null;
  calls: number | null;
  order: number | null;
  shape: string;
  dtype: string;
  hazards: string[];
  also: string[];
  sites: number[];
}

export interface Warning {
  level: "error" | "warning" | "note";
  what: string;
  site: number | null;
  module: string | null;
  run: number;
  text: string;
}

export interface Measured {
  title: string;
  base: number | null;
  rows: { name: string; value: number; site: number | null; module: string | null }[];
}

export interface Page {
  title: string;
  made: string;
  version: string;
  notes: string[];
  runs: { name: string }[];
  modules: Module[];
  sites: Site[];
  tokens: string[][] | null;
  warnings: Warning[];
  measured: Measured[];
}

/** The reason why the page can't be shown, as text for the reader. */
export class PageError extends Error {}

const AGAIN = "Write the page again with hl.explore(...).";

/** Read the data of the page; throw a PageError if anything is wrong with it. */
export function readPage(text: string | null | undefined): Page {
  if (!text || !text.trim() || text.trim().startsWith("/*")) {
    throw new PageError("This page holds no data: it is the empty form that hl.explore(...) fills in.");
  }
  let found: unknown;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new PageError(`The data of this page can't be read (${(error as Error).message}): the file is damaged or cut off. ${AGAIN}`);
  }
  const page = found as Page & { format?: unknown };
  const [name, version] = Array.isArray(page?.format) ? page.format : [];
  if (name !== "hookline page") throw new PageError(`The data of this page is not a hookline page. ${AGAIN}`);
  if (version !== 1) throw new PageError(`The data of this page has format ${version}, and this page shows format 1. ${AGAIN}`);
  for (const list of ["runs", "modules", "sites", "warnings", "measured"] as const) {
    if (!Array.isArray(page[list])) throw new PageError(`The data of this page lacks its ${list}. ${AGAIN}`);
  }
  return complete(page);
}

/** Turn the words for non-finite numbers into numbers, and give each site and module its index. */
function complete(page: Page): Page {
  page.sites.forEach((site, number) => {
    site.number = number;
    site.stats = (site.stats ?? []).map((stats) => stats && numbersOf(stats));
    site.histogram = (site.histogram ?? []).map((one) => one && { ...one, low: real(one.low), high: real(one.high) });
    site.over = (site.over ?? []).map((over) => over && { ...over, stats: Object.fromEntries(Object.entries(over.stats).map(([name, values]) => [name, values.map(real)])) });
    site.picture ??= [];
    site.shape ??= [];
    site.parts ??= [];
  });
  page.modules.forEach((module, number) => (module.number = number));
  for (const measured of page.measured) {
    if (measured.base !== null) measured.base = real(measured.base);
    for (const row of measured.rows) row.value = real(row.value);
  }
  page.notes ??= [];
  return page;
}

function numbersOf(stats: Stats): Stats {
  const numbers = Object.entries(stats).map(([name, value]) => [name, value === null ? null : real(value)]);
  return Object.fromEntries(numbers) as Stats;
}

/** Read a number: JSON has no NaN and no infinities, so they are written as words. */
export function real(value: unknown): number {
  if (typeof value === "number") return value;
  return { inf: Infinity, "-inf": -Infinity }[String(value)] ?? NaN;
}
