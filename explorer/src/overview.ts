/** The overview, shown when nothing is chosen: warnings first, then measurements, then statistics over depth. */

import { chooseSite, runNames, type App } from "./app";
import { barChart, lineChart, type Line } from "./charts";
import type { Site, Stats } from "./data";
import { depthSites, familiesOf, firstTensors, shortNames, withoutIntegers } from "./families";
import { element, replace } from "./elements";
import { plural } from "./numbers";
import { severalCalls } from "./overcalls";
import { RUN } from "./panels";
import type { Drawn } from "./sitepage";
import { tokenMap } from "./tokenmap";
import { countOf, warningLine, warningsOf } from "./warnings";

const STATISTICS: [name: keyof Stats, label: string][] = [
  ["norm", "norm"],
  ["rms", "rms"],
  ["mean", "mean"],
  ["std", "std"],
  ["abs", "mean |x|"],
  ["min", "min"],
  ["max", "max"],
  ["zeros", "share of zeros"],
  ["dead", "share of dead units"],
  ["nan", "share of NaN"],
  ["inf", "share of Inf"],
];
const MOST_WARNINGS = 8;

/** The overview page. */
export function overview(app: App): Drawn {
  const chosen = depthSites(app);
  const sites = firstTensors(withoutIntegers(chosen));
  const depth = element("div", { class: "chart-place" });
  const flow = element("div", { class: "chart-place" });
  const tokens = tokenMap(app, sites);
  const flows = sites.filter((site) => site.gradient !== null).length > 1;
  const page = element(
    "article",
    { class: "overview" },
    warningList(app),
    app.page.measured.length ? element("div", { class: "cards" }, measuredCards(app)) : null,
    familyChoice(app, chosen, sites.length),
    element(
      "div",
      { class: "cards" },
      sites.length ? card("Over depth", statisticChoice(app), legend(depthLines(app, sites)), depth) : null,
      flows ? card("Gradient flow", element("span", { class: "hint" }, "norms, log scale"), flowLegend(app), flow) : null,
    ),
    tokens?.element ?? null,
    notes(app),
  );
  const draw = (): void => {
    if (sites.length) replace(depth, depthChart(app, sites, depth.clientWidth));
    if (flows) replace(flow, flowChart(app, sites, flow.clientWidth));
    tokens?.draw();
  };
  return { element: page, draw };
}

function card(title: string, ...children: (Element | null)[]): HTMLElement {
  const [control, ...rest] = children;
  return element("section", { class: "card" }, element("header", {}, element("h3", {}, title), control ?? null), ...rest);
}

/** The warnings, most serious first, each with a link to its site. */
function warningList(app: App): HTMLElement {
  const warnings = warningsOf(app.page);
  if (!app.page.sites.length) return element("section", { class: "calm" }, element("span", { class: "dot" }), "Nothing was captured.");
  if (!warnings.length) {
    return element("section", { class: "calm" }, element("span", { class: "dot good" }), "No warnings: no NaN, no Inf, nothing dead, exploding or vanishing.");
  }
  const list = element("ul", { class: "warnings" }, warnings.slice(0, MOST_WARNINGS).map((one) => warningLine(app, one, true)));
  const rest = warnings.length - MOST_WARNINGS;
  const more = element("button", { class: "quiet", onclick: () => { replace(list, warnings.map((one) => warningLine(app, one, true))); more.remove(); } }, `Show ${rest.toLocaleString("en-US")} more`);
  return element("section", { "aria-label": "Warnings" }, element("header", {}, element("h3", {}, countOf(warnings))), list, rest > 0 ? more : null);
}

function measuredCards(app: App): HTMLElement[] {
  return app.page.measured.map((measured) => {
    const rows = measured.rows.map((row) => {
      const module = app.page.modules.find((one) => one.path === row.module);
      const go = row.site !== null ? () => chooseSite(app, row.site!) : module ? () => app.go({ site: null, module: module.path }) : null;
      return { name: row.name, value: row.value, choose: go };
    });
    const base = measured.base === null ? null : element("span", { class: "hint" }, element("span", { class: "base-key" }), `unchanged: ${measured.base.toPrecision(4)}`);
    return card(measured.title, base, barChart(rows, measured.base));
  });
}

/** Families of sites that one pattern matches: a click puts the pattern into the search. */
function familyChoice(app: App, sites: Site[], drawn: number): HTMLElement {
  const families = familiesOf(app.page).slice(0, 8);
  const buttons = families.map(({ pattern }) =>
    element("button", { class: app.state.search === pattern ? "chip on" : "chip", "data-key": `family ${pattern}`, onclick: () => app.go({ search: app.state.search === pattern ? "" : pattern }) }, pattern),
  );
  return element(
    "div",
    { class: "families" },
    element("h3", {}, app.state.search ? `${plural(sites.length, "site")} that match${sites.length === 1 ? "es" : ""}` : `${plural(sites.length, "site")}${families[0] && families[0].sites.length === sites.length ? ` of ${families[0].pattern}` : " in the order they ran"}`),
    drawn < sites.length ? element("span", { class: "hint" }, `${drawn.toLocaleString("en-US")} are drawn: no integers, and of each value one tensor;`) : null,
    severalCalls(sites) ? element("span", { class: "hint several-calls" }, `${severalCalls(sites)};`) : null,
    buttons.length ? element("span", { class: "hint" }, "patterns that fit here:") : null,
    buttons,
  );
}

function statisticChoice(app: App): HTMLElement {
  const change = (event: Event): void => app.go({ statistic: (event.target as HTMLSelectElement).value }, "replace");
  return element(
    "select",
    { "aria-label": "Statistic", "data-key": "statistic", onchange: change },
    STATISTICS.map(([name, label]) => element("option", { value: name, selected: name === app.state.statistic }, label)),
  );
}

function statisticOf(app: App): keyof Stats {
  return STATISTICS.find(([name]) => name === app.state.statistic)?.[0] ?? "norm";
}

function legend(lines: Line[]): HTMLElement | null {
  if (lines.length < 2) return null;
  return element("div", { class: "line-legend" }, lines.map((line) => element("span", {}, element("span", { class: `swatch ${line.colour}` }), line.name)));
}

/** The legend for the colours and dashes of the gradient flow. */
function flowLegend(app: App): HTMLElement {
  const names = runNames(app.page);
  const runs = names.length > 1 ? [["solid", names[0]!], ["broken", names[1]!]] : [];
  const keys = [["flow-value", "value"], ["flow-gradient", "gradient"], ...runs];
  return element("div", { class: "line-legend" }, keys.map(([kind, name]) => element("span", {}, element("span", { class: `swatch ${kind}` }), name!)));
}

function depthLines(app: App, sites: Site[]): Line[] {
  const name = statisticOf(app);
  return runNames(app.page).map((run, number) => ({ name: run, colour: RUN[number]!, values: sites.map((site) => site.stats[number]?.[name] ?? null) }));
}

function depthChart(app: App, sites: Site[], width: number): Element {
  const name = statisticOf(app);
  const lines = depthLines(app, sites);
  const numbers = lines.flatMap((line) => line.values).filter((value): value is number => value !== null && Number.isFinite(value) && value !== 0);
  const log = numbers.length > 1 && Math.min(...numbers) > 0 && Math.max(...numbers) / Math.min(...numbers) > 100;
  return lineChart({ label: `${name} of ${plural(sites.length, "site")}, in the order they ran`, names: shortNames(sites), lines, width, height: 240, log, choose: (place) => chooseSite(app, sites[place]!.number) });
}

function flowLines(app: App, sites: Site[]): Line[] {
  const { page } = app;
  const two = page.runs.length > 1;
  return page.runs.flatMap((_, run) => {
    const dash = run === 1 ? " dashed" : "";
    const of = two ? ` (${runNames(page)[run]})` : "";
    return [
      { name: `value${of}`, colour: `flow-value${dash}`, values: sites.map((site) => site.stats[run]?.norm ?? null) },
      { name: `gradient${of}`, colour: `flow-gradient${dash}`, values: sites.map((site) => (site.gradient === null ? null : (page.sites[site.gradient]?.stats[run]?.norm ?? null))) },
    ];
  });
}

function flowChart(app: App, sites: Site[], width: number): Element {
  return lineChart({ label: "Norms of values and gradients over depth", names: shortNames(sites), lines: flowLines(app, sites), width, height: 240, log: true, choose: (place) => chooseSite(app, sites[place]!.number) });
}

function notes(app: App): HTMLElement | null {
  const texts = [...new Set(app.page.notes)];
  if (!texts.length) return null;
  return element("details", { class: "notes" }, element("summary", {}, plural(texts.length, "note")), element("ul", {}, texts.map((text) => element("li", {}, text))));
}
