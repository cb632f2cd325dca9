/** A site that passed in several calls: what of them is shown, and a statistic over them. */

import { runNames, type App } from "./app";
import { lineChart } from "./charts";
import type { Site } from "./data";
import { element, replace } from "./elements";
import { plural } from "./numbers";
import { RUN } from "./panels";
import type { Drawn } from "./sitepage";

/** How the calls of a site are shown: "12, of which the latest is shown", or nothing if there is one. */
export function callsOf(site: Site): string {
  const calls = site.calls.filter((one) => one > 0);
  if (!calls.some((one) => one > 1)) return "";
  return `${calls.join(" and ")}, ${isJoined(site) ? "joined to one sequence" : "of which the latest is shown"}`;
}

/** What to say of the sites that passed in several calls; nothing if there are none. */
export function severalCalls(sites: Site[]): string {
  const several = sites.filter((site) => site.calls.some((one) => one > 1));
  const latest = several.filter((site) => !isJoined(site));
  const joined = several.length - latest.length;
  const parts = [
    joined ? `the calls of ${plural(joined, "site")} are joined to one sequence` : "",
    latest.length ? `of ${plural(latest.length, "site")} with several calls the latest is shown` : "",
  ];
  return parts.filter(Boolean).join("; ");
}

function isJoined(site: Site): boolean {
  return site.over.some((over) => over?.joined);
}

/** A statistic of each call, as a line for each run; null if only one call was kept. */
export function overCalls(app: App, site: Site): Drawn | null {
  const kept = site.over.filter((over) => over !== null);
  const longest = kept.toSorted((one, other) => other.numbers.length - one.numbers.length)[0];
  if (!longest) return null;
  const names = Object.keys(longest.stats);
  const statistic = names.includes(app.state.statistic) ? app.state.statistic : names[0]!;
  const change = (event: Event): void => app.go({ statistic: (event.target as HTMLSelectElement).value }, "replace");
  const choice = element("select", { "aria-label": "Statistic over calls", "data-key": "over calls", onchange: change }, names.map((name) => element("option", { value: name, selected: name === statistic }, name)));
  const thinned = longest.numbers.length < longest.of ? element("span", { class: "hint" }, `${longest.numbers.length} of ${longest.of}`) : null;
  const place = element("div", { class: "chart-place" });
  const page = element("section", { class: "over-calls" }, element("header", {}, element("h3", {}, `Over ${longest.along}s`), choice, thinned), place);
  const lines = runNames(app.page).flatMap((name, run) => {
    const over = site.over[run];
    return over ? [{ name, colour: RUN[run]!, values: over.stats[statistic] ?? [] }] : [];
  });
  const label = `${statistic} of ${site.name || "the model"} over ${longest.along}s`;
  const draw = (): void => replace(place, lineChart({ label, names: longest.numbers.map((one) => `${longest.along} ${one}`), lines, width: Math.max(200, place.clientWidth), height: 180, log: false, choose: () => undefined }));
  return { element: page, draw };
}
