/** Tokens × layers: a statistic of each token at each of the given sites. */

import { chooseSite, runNames, type App } from "./app";
import { colourOf, gradientOf, type Scale } from "./colours";
import { real, type Site } from "./data";
import { shortNames } from "./families";
import { element, replace } from "./elements";
import { short } from "./numbers";
import { RUN } from "./panels";
import type { Drawn } from "./sitepage";
import { hideTip, showTip } from "./tip";

const ROW = 19;
const NAMES = 116;
const TOKENS = ["norm", "mean", "std", "abs", "max"];

/** The map, or null if fewer than two sites have tokens. */
export function tokenMap(app: App, sites: Site[]): Drawn | null {
  const rows = sites.filter((site) => site.tokens?.some(Boolean));
  const length = Math.max(0, ...rows.map((site) => tokensIn(site)));
  const same = rows.filter((site) => tokensIn(site) === length);
  if (same.length < 2 || length < 2) return null;
  const statistic = TOKENS.includes(app.state.statistic) ? app.state.statistic : "norm";
  const place = element("div", { class: "chart-place" });
  const key = element("span", { class: "legend" });
  const run = { a: 0, b: 1, difference: 2, all: app.page.runs.length > 1 ? 2 : 0 }[app.state.view];
  const shown = Math.min(run, runNames(app.page).length - 1);
  const title = `Tokens × layers: ${statistic}${app.page.runs.length > 1 ? ` of ${shown === 2 ? "the " : ""}${runNames(app.page)[shown]}` : ""}`;
  const page = element("section", { class: "card" }, element("header", {}, element("h3", {}, title), runChoice(app, shown), key), place);
  return { element: page, draw: () => draw(app, same, statistic, shown, place, key) };
}

function tokensIn(site: Site): number {
  const first = site.tokens?.find(Boolean);
  return first ? (Object.values(first)[0]?.[0]?.length ?? 0) : 0;
}

function runChoice(app: App, shown: number): HTMLElement | null {
  if (app.page.runs.length < 2) return null;
  const views = ["a", "b", "difference"] as const;
  return element(
    "div",
    { class: "segments small", role: "group", "aria-label": "Run" },
    runNames(app.page).map((name, run) => element("button", { "aria-pressed": String(run === shown), "data-key": `tokens ${run}`, onclick: () => app.go({ view: views[run]! }, "replace") }, element("span", { class: `swatch ${RUN[run]}` }), name)),
  );
}

function numbersOf(site: Site, run: number, statistic: string, sample: number): number[] {
  const samples = site.tokens?.[run]?.[statistic] ?? [];
  return (samples[Math.min(sample, samples.length - 1)] ?? []).map(real);
}

function draw(app: App, sites: Site[], statistic: string, run: number, place: HTMLElement, key: HTMLElement): void {
  const matrix = sites.map((site) => numbersOf(site, run, statistic, app.state.sample));
  const finite = matrix.flat().filter(Number.isFinite);
  const scale = scaleFor(finite);
  const tokens = matrix[0]!.length;
  const words = app.page.tokens?.[Math.min(app.state.sample, app.page.tokens.length - 1)] ?? null;
  const named = words && words.length === tokens ? words : null;
  const top = named ? 54 : 24;
  const width = Math.max(200, place.clientWidth);
  const cell = Math.min(72, (width - NAMES - 4) / tokens);
  const height = top + sites.length * ROW + 4;
  const dense = window.devicePixelRatio || 1;
  const label = `${statistic} of ${tokens} tokens in ${sites.length} sites. Arrow keys move over the numbers, Enter goes to a site.`;
  const canvas = element("canvas", { class: "picture clickable", tabindex: 0, role: "img", "aria-label": label, width: Math.round(width * dense), height: Math.round(height * dense), style: { width: `${width}px`, height: `${height}px` } });
  const context = canvas.getContext("2d")!;
  context.scale(dense, dense);
  matrix.forEach((row, layer) => row.forEach((value, token) => {
    context.fillStyle = colourOf(value, scale, app.theme);
    context.fillRect(NAMES + token * cell, top + layer * ROW, Math.max(0.5, cell - (cell > 6 ? 1 : 0)), ROW - 1);
  }));
  writeNames(context, shortNames(sites), named, tokens, top, cell);
  follow(app, canvas, sites, matrix, { run, named, top, cell, statistic });
  replace(place, canvas);
  replace(key, element("span", { class: "end" }, short(scale.low, 3)), element("span", { class: "ramp", style: { background: gradientOf(scale, app.theme) } }), element("span", { class: "end" }, short(scale.high, 3)));
}

function scaleFor(numbers: number[]): Scale {
  const [low, high] = [Math.min(...numbers, 0), Math.max(...numbers, 0)];
  if (low < 0) {
    const limit = Math.max(-low, high) || 1;
    return { low: -limit, high: limit, diverging: true };
  }
  const least = numbers.length ? Math.min(...numbers) : 0;
  return { low: least > high / 2 ? least : 0, high: high || 1, diverging: false };
}

function writeNames(context: CanvasRenderingContext2D, layers: string[], words: string[] | null, tokens: number, top: number, cell: number): void {
  const style = getComputedStyle(document.documentElement);
  context.font = `11px ${style.getPropertyValue("--mono")}`;
  context.fillStyle = style.getPropertyValue("--quiet");
  context.textBaseline = "middle";
  context.textAlign = "right";
  layers.forEach((layer, place) => context.fillText(layer.length > 16 ? `…${layer.slice(-15)}` : layer, NAMES - 8, top + (place + 0.5) * ROW));
  context.textAlign = "left";
  const every = Math.max(1, Math.ceil((words ? 12 : 30) / cell));
  for (let token = 0; token < tokens; token += every) {
    context.save();
    context.translate(NAMES + (token + 0.5) * cell, top - 7);
    if (words) context.rotate(-Math.PI / 4);
    const word = words ? words[token]!.trim() || words[token]! : String(token);
    context.fillText(word.length > 10 ? `${word.slice(0, 9)}…` : word, words ? -2 : -4, 0);
    context.restore();
  }
}

interface Geometry {
  run: number;
  named: string[] | null;
  top: number;
  cell: number;
  statistic: string;
}

function follow(app: App, canvas: HTMLCanvasElement, sites: Site[], matrix: number[][], at: Geometry): void {
  let now: [layer: number, token: number] | null = null;
  const show = (layer: number, token: number, x: number, y: number): void => {
    const tokens = matrix[0]!.length;
    if (layer < 0 || token < 0 || layer >= sites.length || token >= tokens) return hideTip();
    now = [layer, token];
    const word = at.named ? ` “${at.named[token]}”` : "";
    const lines = runNames(app.page).map((name, run) => {
      const value = numbersOf(sites[layer]!, run, at.statistic, app.state.sample)[token] ?? NaN;
      return element("div", { class: "tip-line" }, element("span", { class: `swatch ${RUN[run]}` }), element("span", { class: "tip-name" }, app.page.runs.length > 1 ? name : at.statistic), element("b", {}, short(value, 5)));
    });
    showTip(x, y, element("div", { class: "tip-title" }, `${sites[layer]!.name || "model"} · token ${token}${word}`), lines);
  };
  const under = (event: MouseEvent): [number, number] => {
    const frame = canvas.getBoundingClientRect();
    return [Math.floor((event.clientY - frame.top - at.top) / ROW), Math.floor((event.clientX - frame.left - NAMES) / at.cell)];
  };
  canvas.addEventListener("mousemove", (event) => show(...under(event), event.clientX, event.clientY));
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("blur", hideTip);
  canvas.addEventListener("click", (event) => {
    const site = sites[under(event)[0]];
    if (site) chooseSite(app, site.number);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && now) chooseSite(app, sites[now[0]]!.number);
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [layer, token] = now ? [now[0] + step[0]!, now[1] + step[1]!] : [0, 0];
    const frame = canvas.getBoundingClientRect();
    show(layer, token, frame.left + NAMES + token * at.cell, frame.top + at.top + layer * ROW);
  });
}
