/** The page of one site: its description, its pictures, its statistics. */

import { choose, moduleOf, runNames, suffixOf, type App } from "./app";
import type { Module, Site, Warning } from "./data";
import { element } from "./elements";
import { histogramChart } from "./histogram";
import { count, plural } from "./numbers";
import { callsOf, overCalls } from "./overcalls";
import { Panels, RUN } from "./panels";
import { statisticsTable } from "./statistics";
import type { View } from "./state";
import { warningLine, warningsOf } from "./warnings";

const settings: { log: boolean | null } = { log: null }; // Null: it depends on the value.

export interface Drawn {
  element: HTMLElement;
  draw: () => void; // Called when the element is in the page, and when its width changes.
}

/** The page of a site; a gradient is shown beside the value it belongs to. */
export function sitePage(app: App, asked: Site): Drawn {
  const site = asked.value === null ? asked : (app.page.sites[asked.value] ?? asked);
  const gradient = site.gradient === null ? null : (app.page.sites[site.gradient] ?? null);
  const module = moduleOf(app.page, site);
  const panels = [new Panels(app, site, gradient ? "Value" : titleOf(site))];
  if (gradient && app.state.gradient) panels.push(new Panels(app, gradient, "Gradient", sameShape(site, gradient) ? site.kind : gradient.kind));
  const calls = overCalls(app, site);
  const spread = element("div", { class: "spread" });
  const drawSpread = (): void => drawHistograms(app, site, app.state.gradient ? gradient : null, spread);
  const page = element(
    "article",
    { class: "site" },
    heading(app, site, module),
    warningsHere(app, site, gradient, module),
    element("div", { class: "switches" }, runSwitch(app), gradient ? gradientSwitch(app) : null),
    element(
      "div",
      { class: "columns" },
      element("div", { class: "pictures" }, panels.map((one) => one.element), calls?.element ?? null),
      element(
        "div",
        { class: "figures" },
        element("section", {}, element("header", {}, element("h3", {}, "Statistics"), element("span", { class: "hint" }, "exact, of the whole value")), element("div", { class: "wide" }, statisticsTable(app, site), gradient && app.state.gradient ? [element("p", { class: "bars-title" }, "gradient"), statisticsTable(app, gradient)] : null)),
        element("section", {}, element("header", {}, element("h3", {}, "Histogram"), logSwitch(drawSpread, logOf(site))), spread),
      ),
    ),
  );
  return { element: page, draw: () => { panels.forEach((one) => one.draw()); calls?.draw(); drawSpread(); } };
}

/** The page of a module at which nothing was captured. */
export function modulePage(app: App, module: Module): Drawn {
  const below = app.page.modules.filter((one) => module.path === "" || one.path.startsWith(`${module.path}.`)).find((one) => one.sites.length);
  const page = element(
    "article",
    { class: "site" },
    element("header", { class: "heading" }, crumbs(app, module.path), facts(module, null)),
    warningsHere(app, null, null, module),
    element(
      "p",
      { class: "empty" },
      "Nothing was captured here. ",
      below ? element("button", { class: "link", onclick: () => choose(app, below, app.page.sites[below.sites[0]!]!) }, `Go to ${below.path || "the model"}`) : null,
    ),
  );
  return { element: page, draw: () => undefined };
}

function sameShape(one: Site, other: Site): boolean {
  return one.shape.join() === other.shape.join();
}

function titleOf(site: Site): string {
  return site.port.startsWith("grad") ? "Gradient" : "Value";
}

function heading(app: App, site: Site, module: Module | null): HTMLElement {
  const siblings = (module?.sites ?? []).map((number) => app.page.sites[number]!).filter((one) => one.value === null);
  const tabs = siblings.length < 2 ? null : element(
    "nav",
    { class: "siblings", "aria-label": "Values of this module" },
    siblings.map((one) =>
      element("button", { class: one === site ? "tab on" : "tab", "aria-pressed": String(one === site), "data-key": `tab ${one.name}`, onclick: () => module && choose(app, module, one) }, suffixOf(one) || "output"),
    ),
  );
  return element("header", { class: "heading" }, crumbs(app, site.path, suffixOf(site)), facts(module, site), tabs);
}

/** The path, in which each name links to its module. */
function crumbs(app: App, path: string, rest = ""): HTMLElement {
  const names = path === "" ? [] : path.split(".");
  const links = names.flatMap((name, depth) => {
    const module = app.page.modules.find((one) => one.path === names.slice(0, depth + 1).join("."));
    const last = depth === names.length - 1;
    const open = (): void => {
      if (!module) return;
      const site = module.sites.map((number) => app.page.sites[number]!).find((one) => one.port === "output" && !one.member) ?? null;
      choose(app, module, site);
    };
    const link = last || !module ? element("span", { class: "crumb last" }, name) : element("button", { class: "crumb", onclick: open }, name);
    return last ? [link] : [link, element("span", { class: "point" }, ".")];
  });
  return element("h2", {}, links, rest ? element("span", { class: "rest-of-name" }, rest) : null, links.length || rest ? null : "model");
}

function facts(module: Module | null, site: Site | null): HTMLElement {
  const parts: [string, string][] = [
    ["type", module?.type ?? ""],
    ["shape", site ? shapesOf(site).join(" and ") : (module?.shape ?? "")],
    ["dtype", site?.dtype ?? module?.dtype ?? ""],
    ["parameters", module?.parameters ? count(module.parameters) : ""],
    ["calls", (site && callsOf(site)) || (module?.calls === 0 ? "none" : "")],
    ["call order", module?.order === null || module?.order === undefined ? "" : String(module.order)],
    ["also named", (module?.also ?? []).join(", ")],
  ];
  return element("dl", { class: "facts" }, parts.filter(([, text]) => text).map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
}

/** The shape, or the shapes of the two runs if they differ. */
function shapesOf(site: Site): string[] {
  const shapes = site.picture.slice(0, 2).flatMap((picture) => (picture ? [picture.of.join(" × ")] : []));
  return new Set(shapes).size > 1 ? shapes : [site.shape.join(" × ")];
}

/** The warnings about this site, with their runs, and the scan's hazards of the module that no warning mentions. */
function warningsHere(app: App, site: Site | null, gradient: Site | null, module: Module | null): HTMLElement | null {
  const here = (warning: Warning): boolean =>
    (warning.site !== null && (warning.site === site?.number || warning.site === gradient?.number)) || (warning.site === null && warning.module !== null && warning.module === module?.path);
  const warnings = warningsOf(app.page).filter(here);
  const hazards = (module?.hazards ?? []).filter((hazard) => !warnings.some((warning) => warning.text.includes(hazard)));
  const notes = hazards.map((text) => element("li", { class: "note" }, element("span", { class: "dot note" }), element("span", {}, text)));
  const lines = [...warnings.map((warning) => warningLine(app, warning, false)), ...notes];
  return lines.length ? element("ul", { class: "warnings here" }, lines) : null;
}

/** The choice of run A, run B, their difference, or all side by side. */
function runSwitch(app: App): HTMLElement | null {
  const names = runNames(app.page);
  if (names.length < 2) return null;
  const views: [View, string, number | null][] = [["all", "side by side", null], ["a", names[0]!, 0], ["b", names[1]!, 1], ["difference", "difference", 2]];
  return element(
    "div",
    { class: "segments", role: "group", "aria-label": "Run" },
    views.map(([view, name, run]) =>
      element("button", { "aria-pressed": String(app.state.view === view), "data-key": `view ${view}`, onclick: () => app.go({ view }) }, run === null ? null : element("span", { class: `swatch ${RUN[run]}` }), name),
    ),
  );
}

function gradientSwitch(app: App): HTMLElement {
  const change = (event: Event): void => app.go({ gradient: (event.target as HTMLInputElement).checked }, "replace");
  return element("label", { class: "check" }, element("input", { type: "checkbox", checked: app.state.gradient, "data-key": "gradient", onchange: change }), "gradient beside the value");
}

/** Whether counts are drawn on a log scale: the reader's choice; by default, if one bin would hide all others. */
function logOf(site: Site): boolean {
  const counts = site.histogram.find(Boolean)?.counts ?? [];
  return settings.log ?? Math.max(0, ...counts) > 0.4 * counts.reduce((sum, one) => sum + one, 0);
}

function logSwitch(draw: () => void, log: boolean): HTMLElement {
  const change = (event: Event): void => {
    settings.log = (event.target as HTMLInputElement).checked;
    draw();
  };
  return element("label", { class: "check hint" }, element("input", { type: "checkbox", checked: log, "data-key": "log", onchange: change }), "log counts");
}

function drawHistograms(app: App, site: Site, gradient: Site | null, place: HTMLElement): void {
  const names = runNames(app.page);
  const runs = { a: [0], b: [1], difference: [2], all: [0, 1] }[app.state.view];
  const width = Math.max(200, place.clientWidth);
  const chart = (one: Site): Element => {
    const chosen = one.histogram.map((histogram, run) => (names.length < 2 || runs.includes(run) ? histogram : null));
    return histogramChart(chosen, names, width, logOf(site));
  };
  place.replaceChildren(chart(site), ...(gradient ? [element("p", { class: "bars-title" }, "gradient"), chart(gradient)] : []));
  place.setAttribute("aria-label", `Histograms of ${plural(gradient ? 2 : 1, "value")}`);
}
