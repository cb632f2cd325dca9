/** The keys of the page, and the help that lists them. */

import { element } from "./elements";

export interface Acts {
  search: () => void;
  back: () => void;
  next: () => void;
  previous: () => void;
  difference: () => void;
  beside: () => void;
  gradient: () => void;
  tree: () => void;
  theme: () => void;
}

const KEYS: [keys: string[], meaning: string][] = [
  [["/"], "search"],
  [["j", "k"], "next and previous site"],
  [["d"], "difference of the runs, and back"],
  [["s"], "runs side by side"],
  [["g"], "gradient beside the value, or not"],
  [["t"], "go to the tree; arrow keys move, Enter chooses"],
  [["Esc"], "back: from what is enlarged, from a site, from a search"],
  [["Tab"], "go on; in a picture, arrow keys move over the numbers"],
  [["l"], "light or dark"],
  [["?"], "this list"],
];

const LANGUAGE: [pattern: string, meaning: string][] = [
  ["h.*.mlp", "the same place in every layer"],
  ["h.{0,3}", "two of them"],
  ["h.0.**", "everything below"],
  ["**.attn/softmax", "a function, wherever it is"],
  ["h.*:grad_output", "gradients"],
  ["attn", "no pattern: any name with these letters"],
];

/** Listen to the keys, except where the reader types text. */
export function listen(acts: Acts): void {
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
    const typing = (event.target as Element).closest("input[type=search], textarea, select");
    const act = actOf(event.key, acts);
    if (!act || (typing && event.key !== "Escape")) return;
    event.preventDefault();
    act();
  });
}

function actOf(key: string, acts: Acts): (() => void) | undefined {
  const all: Record<string, () => void> = {
    "/": acts.search,
    j: acts.next,
    k: acts.previous,
    d: acts.difference,
    s: acts.beside,
    g: acts.gradient,
    t: acts.tree,
    l: acts.theme,
    Escape: acts.back,
    "?": showHelp,
  };
  return all[key];
}

/** Show the list of keys. */
export function showHelp(): void {
  const dialog: HTMLDialogElement = element(
    "dialog",
    { class: "help", "aria-label": "Help", onclose: () => dialog.remove(), onclick: (event: Event) => event.target === dialog && dialog.close() },
    element("div", { class: "help-inside" },
      element("h2", {}, "Keys"),
      element("dl", {}, KEYS.map(([keys, meaning]) => element("div", {}, element("dt", {}, keys.map((key) => element("kbd", {}, key))), element("dd", {}, meaning)))),
      element("h2", {}, "Search"),
      element("dl", {}, LANGUAGE.map(([pattern, meaning]) => element("div", {}, element("dt", {}, element("code", {}, pattern)), element("dd", {}, meaning)))),
      element("button", { class: "close", onclick: () => dialog.close() }, "Close"),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}
