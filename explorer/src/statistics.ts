/** The table of exact statistics: a column for each run and their difference. */

import { runNames, type App } from "./app";
import type { Site, Stats } from "./data";
import { element } from "./elements";
import { exact, percent, short } from "./numbers";
import { RUN } from "./panels";

const ROWS: [name: keyof Stats, label: string, meaning: string][] = [
  ["mean", "mean", "The average"],
  ["std", "std", "The standard deviation"],
  ["min", "min", "The smallest"],
  ["max", "max", "The largest"],
  ["abs", "mean |x|", "The average size"],
  ["rms", "rms", "The root of the average square"],
  ["norm", "norm", "The length as a vector"],
  ["zeros", "zeros", "The share that is exactly zero"],
  ["dead", "dead units", "The share of units that are zero wherever they are seen"],
  ["nan", "NaN", "The share that is not a number"],
  ["inf", "Inf", "The share that is infinite"],
  ["elements", "numbers", "How many there are"],
];
const SHARES = new Set<keyof Stats>(["zeros", "dead", "nan", "inf"]);

/** Statistics of a site. */
export function statisticsTable(app: App, site: Site): HTMLElement {
  const names = runNames(app.page);
  const columns = names.map((name, run) => ({ name, run, stats: site.stats[run] ?? null }));
  const head = element("tr", {}, element("th", { scope: "col" }, element("span", { class: "unseen" }, "statistic")), columns.map(({ name, run }) => {
    const title = run === 2 ? `Statistics of ${names[1]} − ${names[0]}` : name;
    return element("th", { scope: "col", title }, element("span", { class: `swatch ${RUN[run]}` }), names.length > 1 ? name : "value");
  }));
  const body = ROWS.filter(([name]) => columns.some(({ stats }) => stats && stats[name] !== null && stats[name] !== undefined)).map(([name, label, meaning]) =>
    element("tr", {}, element("th", { scope: "row", title: meaning }, label), columns.map(({ stats }) => cellOf(name, stats))),
  );
  return element("table", { class: "statistics" }, element("thead", {}, head), element("tbody", {}, body));
}

function cellOf(name: keyof Stats, stats: Stats | null): HTMLElement {
  const value = stats?.[name];
  if (value === null || value === undefined) return element("td", {}, element("span", { class: "none" }, "–"));
  const alarm = (name === "nan" || name === "inf") && value > 0 ? "alarm" : null;
  const facts = { class: alarm, title: exact(value), "data-exact": String(value) };
  if (SHARES.has(name)) return element("td", facts, percent(value));
  if (name === "elements") return element("td", facts, short(value));
  const [whole, rest] = split(short(value, 6));
  return element("td", facts, whole, element("span", { class: "rest" }, rest));
}

/** Cut a number at its decimal point, so that the points of a column are aligned. */
function split(text: string): [string, string] {
  const at = text.search(/[.e]/);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at)];
}
