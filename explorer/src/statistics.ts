/** The table of exact statistics: a column for each run and their difference, for the value and for its gradient. */

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

/** Statistics of a site, and of its gradient beside it. */
export function statisticsTable(app: App, site: Site, gradient: Site | null): HTMLElement {
  const names = runNames(app.page);
  const groups = [{ title: gradient ? "value" : "", site }, ...(gradient ? [{ title: "gradient", site: gradient }] : [])];
  const columns = groups.flatMap((group) => names.map((name, run) => ({ name, run, stats: group.site.stats[run] ?? null })));
  const head = element("tr", {}, element("th", { scope: "col" }, element("span", { class: "unseen" }, "statistic")), columns.map(({ name, run }) => {
    const title = run === 2 ? `Statistics of ${names[1]} − ${names[0]}` : name;
    return element("th", { scope: "col", title, class: run === 0 ? "first" : null }, element("span", { class: `swatch ${RUN[run]}` }), names.length > 1 ? name : "value");
  }));
  const over = gradient && element("tr", { class: "groups" }, element("td"), groups.map((group) => element("th", { colspan: names.length, scope: "colgroup", class: "first" }, group.title)));
  const body = ROWS.filter(([name]) => columns.some(({ stats }) => stats && stats[name] !== null && stats[name] !== undefined)).map(([name, label, meaning]) =>
    element("tr", {}, element("th", { scope: "row", title: meaning }, label), columns.map(({ stats, run }) => cellOf(name, stats, run))),
  );
  return element("table", { class: "statistics" }, element("thead", {}, over, head), element("tbody", {}, body));
}

function cellOf(name: keyof Stats, stats: Stats | null, run: number): HTMLElement {
  const value = stats?.[name];
  const kind = run === 0 ? "first" : null;
  if (value === null || value === undefined) return element("td", { class: kind }, element("span", { class: "none" }, "–"));
  const alarm = (name === "nan" || name === "inf") && value > 0 ? "alarm" : null;
  const text = SHARES.has(name) ? percent(value) : short(value, 6);
  const [whole = "", rest = ""] = SHARES.has(name) ? [text] : split(text);
  const classes = [kind, alarm, SHARES.has(name) && "share"].filter(Boolean).join(" ") || null;
  return element("td", { class: classes, title: exact(value), "data-exact": String(value) }, whole, SHARES.has(name) ? null : element("span", { class: "rest" }, rest));
}

/** Cut a number at its point, so that the points of a column stand below each other. */
function split(text: string): [string, string] {
  const at = text.search(/[.e]/);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at)];
}
