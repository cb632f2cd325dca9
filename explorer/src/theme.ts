/** Light or dark: the setting of the reader's system, until the reader chooses. */

import type { Theme } from "./colours";

const KEY = "hookline theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** The current theme. */
export function themeNow(): Theme {
  const kept = keptTheme();
  return kept ?? (dark.matches ? "dark" : "light");
}

/** Apply the theme now and whenever the system's setting changes. */
export function wearTheme(changed: () => void): void {
  const wear = (): void => {
    document.documentElement.dataset["theme"] = themeNow();
    changed();
  };
  dark.addEventListener("change", wear);
  wear();
}

/** Switch between light and dark. */
export function turnTheme(): Theme {
  const theme = themeNow() === "dark" ? "light" : "dark";
  keep(theme);
  document.documentElement.dataset["theme"] = theme;
  return theme;
}

let inMemory: Theme | null = null; // For browsers that don't let a page store anything, as in a notebook.

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
    // The theme is kept only while the page is open.
  }
}
