/** Light or dark: as the reader's system has it, until the reader says otherwise. */

import type { Theme } from "./colours";

const KEY = "hookline theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** The theme there is now. */
export function themeNow(): Theme {
  const kept = keptTheme();
  return kept ?? (dark.matches ? "dark" : "light");
}

/** Dress the page, now and whenever the system changes. */
export function wearTheme(changed: () => void): void {
  const wear = (): void => {
    document.documentElement.dataset["theme"] = themeNow();
    changed();
  };
  dark.addEventListener("change", wear);
  wear();
}

/** Turn light into dark and back. */
export function turnTheme(): Theme {
  const theme = themeNow() === "dark" ? "light" : "dark";
  keep(theme);
  document.documentElement.dataset["theme"] = theme;
  return theme;
}

let inMemory: Theme | null = null; // Where the browser lets a page keep nothing, as in a notebook.

function keptTheme(): Theme | null {
  try {
    const kept = inMemory ?? window.localStorage.getItem(KEY);
    return kept === "light" || kept === "dark" ? kept : null;
  } catch {
    return inMemory;
  }
}

function keep(theme: Theme): void {
  inMemory = theme;
  try {
    window.localStorage.setItem(KEY, theme);
  } catch {
    // Only remembered as long as the page is open.
  }
}
