/** The current view, kept in the address after `#`, so that links and the back button work. */

/** Which run is shown: the first, the second, their difference, or all side by side. */
export type View = "a" | "b" | "difference" | "all";

export interface State {
  site: string | null; // The name of the chosen site.
  module: string | null; // The path of the chosen module, if it has no site.
  search: string;
  view: View;
  order: "tree" | "calls";
  sample: number;
  tile: number | null; // The head or channel that is enlarged.
  statistic: string;
  gradient: boolean; // Whether gradients are shown beside values.
}

export const START: State = {
  site: null,
  module: null,
  search: "",
  view: "all",
  order: "tree",
  sample: 0,
  tile: null,
  statistic: "norm",
  gradient: true,
};

const VIEWS: readonly string[] = ["a", "b", "difference", "all"];

/** Write a state as the text after `#`, without default values. */
export function write(state: State): string {
  const changed = Object.entries(state).filter(([name, value]) => value !== START[name as keyof State]);
  return new URLSearchParams(changed.map(([name, value]) => [name, String(value)])).toString();
}

/** Read a state from the text after `#`; invalid values become the default. */
export function read(hash: string): State {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const view = asked.get("view") ?? "";
  return {
    site: asked.get("site"),
    module: asked.get("module"),
    search: asked.get("search") ?? "",
    view: VIEWS.includes(view) ? (view as View) : START.view,
    order: asked.get("order") === "calls" ? "calls" : "tree",
    sample: whole(asked.get("sample")) ?? 0,
    tile: whole(asked.get("tile")),
    statistic: asked.get("statistic") ?? START.statistic,
    gradient: asked.get("gradient") !== "false",
  };
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,6}$/.test(text) ? Number(text) : null;
}
