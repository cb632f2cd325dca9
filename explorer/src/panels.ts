/** The pictures of a site: each run, their difference, the gradient. Comparable pictures share a scale. */

import { runNames, type App } from "./app";
import { barsView } from "./bars";
import { colourOf, gradientOf, type Scale } from "./colours";
import type { Site } from "./data";
import { element, replace } from "./elements";
import { exact, percent, short } from "./numbers";
import { Picture, scaleOf } from "./picture";
import { PictureView, Pointer } from "./pictureview";
import { sampleCount, shownOf } from "./subjects";
import { hideTip, showTip } from "./tip";

export const RUN = ["run-a", "run-b", "run-d"];
const SHARES = [1, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9];

/** The share of the numbers that the colour scale covers; kept while the page is open. */
const chosen = { share: new Map<string, number>() };

interface Panel {
  run: number;
  picture: Picture;
  view: PictureView | null;
  frame: HTMLElement;
}

/** The pictures of one site, for the runs that are chosen. */
export class Panels {
  readonly element: HTMLElement;
  private readonly panels: Panel[];
  private readonly pictures: (Picture | null)[];
  private readonly legends: { element: HTMLElement; runs: number[] }[] = [];
  private readonly pointer = new Pointer();

  constructor(
    private readonly app: App,
    private readonly site: Site,
    title: string,
    private readonly kind: string = site.kind,
  ) {
    this.pictures = site.picture.map((packed) => packed && new Picture(packed));
    this.panels = this.runs().map((run) => this.panelOf(run, this.pictures[run]!));
    this.pointer.onMove((indices) => indices === null && hideTip());
    const across = this.kind === "maps" || this.kind === "attention" || this.kind === "number" ? "beside" : "stacked";
    this.element = element(
      "section",
      { class: "panels", "aria-label": title },
      element("header", {}, element("h3", {}, title), this.controls()),
      this.panels.length ? element("div", { class: across }, this.panels.map((panel) => panel.frame)) : element("p", { class: "empty" }, this.absence()),
      this.note(),
    );
  }

  /** Draw for the available width. */
  draw(): void {
    const scales = new Map<number, Scale>();
    const values = this.pictures.slice(0, 2).filter((picture): picture is Picture => picture !== null);
    for (const { run } of this.panels) {
      scales.set(run, scaleOf(run < 2 ? values : [this.pictures[2]!], this.share, this.kind === "attention")); // Nearly equal weights should look nearly equal.
    }
    for (const panel of this.panels) {
      const room = panel.frame.clientWidth - 2;
      const scale = scales.get(panel.run)!;
      panel.view?.draw(Math.max(80, room), scale, this.app.theme);
      const bars = panel.frame.querySelector(".bars-place");
      if (bars) replace(bars, barsView(this.app, this.site, this.pictures, panel.run, Math.max(80, room)));
    }
    for (const legend of this.legends) {
      const scale = scales.get(legend.runs[0]!);
      if (scale) this.legend(legend.element, scale, legend.runs);
    }
  }

  /** The greatest height of a picture: stacked pictures are lower than pictures side by side. */
  private get tallest(): number {
    const several = this.app.state.view === "all" && this.app.page.runs.length > 1;
    return !several ? 560 : ["maps", "attention"].includes(this.kind) ? 470 : 230;
  }

  private get clipKey(): string {
    return `${this.kind} ${this.site.port}`;
  }

  private get share(): number {
    return chosen.share.get(this.clipKey) ?? (this.kind === "attention" ? 0.98 : 0.995);
  }

  private runs(): number[] {
    const { view } = this.app.state;
    const asked = { a: [0], b: [1], difference: [2], all: [0, 1, 2] }[view];
    const there = (run: number): boolean => Boolean(this.pictures[run]);
    const runs = asked.filter(there);
    return runs.length || this.app.page.runs.length > 1 ? runs : [0].filter(there);
  }

  private absence(): string {
    if (!this.site.shape.length && !this.site.stats.some(Boolean)) return `No tensor: ${this.site.describe || "nothing was captured here"}.`;
    const name = { a: 0, b: 1, difference: 2, all: 0 }[this.app.state.view];
    return this.site.picture.some(Boolean) ? `There is no value in this view (${runNames(this.app.page)[name]}).` : "There is no picture of this value.";
  }

  private panelOf(run: number, picture: Picture): Panel {
    const { page, state } = this.app;
    const { site } = this;
    const sample = Math.min(state.sample, sampleCount(this.kind, picture) - 1);
    const tile = state.tile !== null && state.tile < (picture.shape[1] ?? 0) ? state.tile : null;
    const shown = shownOf(page, this.kind, picture, sample, tile);
    const name = runNames(page)[run] ?? "";
    const view = shown && new PictureView({
      label: `${site.name}, ${name}: ${this.kind} of ${picture.shape.join(" by ")}. Arrow keys move over the numbers.`,
      subject: shown.subject,
      picture,
      place: shown.place,
      cell: shown.cell,
      pointer: this.pointer,
      tallest: this.tallest,
      choose: shown.tileNoun && shown.subject.tiles > 1 ? (cell) => this.app.go({ tile: cell.tile }) : null,
      explain: (cell, x, y) => this.explain(shown.explain(cell), picture.indicesOf(shown.place(cell)), x, y),
    });
    const heading = element("h4", {}, element("span", { class: `swatch ${RUN[run]}` }), name);
    const bars = ["line", "units", "number"].includes(this.kind) ? element("div", { class: "bars-place" }) : null;
    const matrix = this.kind === "units" && (picture.shape[0] ?? 1) < 2 ? null : view;
    return { run, picture, view: matrix, frame: element("div", { class: "panel" }, page.runs.length > 1 ? heading : null, matrix?.element ?? null, bars) };
  }

  /** Show the number under the cursor in every run. */
  private explain(words: string[], indices: number[], x: number, y: number): void {
    showTip(x, y, element("div", { class: "tip-title" }, words.join(" · ")), tipLines(this.app, this.pictures, indices));
  }

  /** The legends with their clipping, the choice of a sample, and the way back from an enlarged tile. */
  private controls(): HTMLElement {
    const { state } = this.app;
    const first = this.panels[0];
    const controls = element("div", { class: "controls" });
    if (!first) return controls;
    const samples = sampleCount(this.kind, first.picture);
    const tiles = first.picture.shape[1] ?? 0;
    const noun = { maps: "channel", attention: "head" }[this.kind];
    if (noun && state.tile !== null && tiles > 1) controls.append(this.enlarged(noun, tiles, state.tile));
    if (samples > 1) controls.append(this.sampleChoice(first.picture, samples));
    if (first.view) {
      for (const runs of [this.runs().filter((run) => run < 2), this.runs().filter((run) => run === 2)]) {
        if (!runs.length) continue;
        const legend = element("div", { class: "legend" });
        this.legends.push({ element: legend, runs });
        controls.append(legend);
      }
      controls.append(this.clip());
    }
    return controls;
  }

  private enlarged(noun: string, tiles: number, tile: number): HTMLElement {
    const go = (to: number | null) => () => this.app.go({ tile: to }, to === null ? "push" : "replace");
    return element(
      "span",
      { class: "stepper" },
      element("button", { "data-key": `${this.site.port} before`, "aria-label": `Previous ${noun}`, onclick: go((tile + tiles - 1) % tiles) }, "‹"),
      element("span", {}, `${noun} ${this.panels[0]!.picture.trueIndex(1, Math.min(tile, tiles - 1))}`),
      element("button", { "data-key": `${this.site.port} after`, "aria-label": `Next ${noun}`, onclick: go((tile + 1) % tiles) }, "›"),
      element("button", { class: "all", "data-key": `${this.site.port} all`, onclick: go(null) }, `all ${tiles} ${noun}s`),
    );
  }

  private sampleChoice(picture: Picture, samples: number): HTMLElement {
    const choices = Array.from({ length: samples }, (_, sample) =>
      element("option", { value: sample, selected: sample === Math.min(this.app.state.sample, samples - 1) }, `sample ${picture.trueIndex(0, sample)}`),
    );
    return element(
      "select",
      { "aria-label": "Sample", "data-key": `${this.site.port} sample`, onchange: (event: Event) => this.app.go({ sample: Number((event.target as HTMLSelectElement).value) }, "replace") },
      choices,
    );
  }

  private clip(): HTMLElement {
    const said = element("output", {}, percent(this.share));
    const slide = (event: Event): void => {
      const share = SHARES[Number((event.target as HTMLInputElement).value)]!;
      chosen.share.set(this.clipKey, share);
      said.textContent = percent(share);
      this.draw();
    };
    const input = element("input", { type: "range", min: 0, max: SHARES.length - 1, step: 1, value: SHARES.indexOf(this.share), "aria-label": "Share of the numbers that the colours cover", oninput: slide });
    return element("label", { class: "clip", title: "The colours cover this share of the numbers; what is beyond has the colour of the end" }, "cover", input, said);
  }

  private legend(legend: HTMLElement, scale: Scale, runs: number[]): void {
    const name = runs[0] === 2 && this.app.state.view === "all" ? "difference" : "";
    const bar = element("span", { class: "ramp", style: { background: gradientOf(scale, this.app.theme) } });
    replace(legend, name ? element("span", { class: "legend-name" }, name) : null, element("span", { class: "end" }, short(scale.low, 3)), bar, element("span", { class: "end" }, short(scale.high, 3)));
    const strange = this.strange(runs).map(([name, value]) =>
      element("span", { class: "strange" }, element("span", { class: "swatch", style: { background: colourOf(value, scale, this.app.theme) } }), name),
    );
    legend.append(...strange);
    legend.setAttribute("title", `${exact(scale.low)} to ${exact(scale.high)}`);
  }

  /** The numbers in these runs that are not finite. */
  private strange(runs: number[]): [name: string, value: number][] {
    const values = runs.flatMap((run) => [...(this.pictures[run]?.counts() ?? [])].flatMap((count, code) => (count ? [this.pictures[run]!.valueOf(code)] : [])));
    const nan: [string, number][] = values.some(Number.isNaN) ? [["NaN", NaN]] : [];
    const infinite: [string, number][] = values.some((value) => Math.abs(value) === Infinity) ? [["Inf", Infinity]] : [];
    return [...nan, ...infinite];
  }

  private note(): HTMLElement | null {
    const first = this.panels[0]?.picture;
    if (!first) return null;
    const parts = [
      first.leftOut ? `Not shown: ${first.leftOut}.` : "",
      first.error > 0 ? `Numbers in the picture are within ${short(first.error, 2)} of the true ones; statistics are exact.` : "Numbers in the picture are exact.",
      this.panels[0]!.view && ["maps", "attention"].includes(this.kind) && this.app.state.tile === null && (first.shape[1] ?? 1) > 1 ? "Click one to enlarge it." : "",
    ];
    return element("p", { class: "caption" }, parts.filter(Boolean).join(" "));
  }
}

/** The value of each run at these indices of the whole value: a number, or why there is none. */
export function tipLines(app: App, pictures: (Picture | null)[], indices: number[]): HTMLElement[] {
  const names = runNames(app.page);
  return pictures.flatMap((picture, run) => {
    if (!picture) return [];
    const swatch = names.length > 1 ? element("span", { class: `swatch ${RUN[run]}` }) : null;
    return [element("div", { class: "tip-line" }, swatch, element("span", { class: "tip-name" }, names.length > 1 ? names[run]! : "value"), tipNumber(picture, run, indices))];
  });
}

function tipNumber(picture: Picture, run: number, indices: number[]): HTMLElement {
  const shown = picture.shownAt(indices);
  if (!shown) {
    const within = indices.every((index, dimension) => index < (picture.of[dimension] ?? 0));
    return element("b", { class: "absent" }, within ? "not shown" : "none");
  }
  const value = picture.value(picture.place(...shown));
  return element("b", { "data-run": run, "data-value": String(value) }, said(picture, value), errorOf(picture, value));
}

/** A number with as many digits as its error allows. */
function said(picture: Picture, value: number): string {
  if (!(picture.error > 0) || !Number.isFinite(value) || value === 0) return short(value, 6);
  const digits = Math.ceil(Math.log10(Math.abs(value) / picture.error)) + 1;
  return short(value, Math.max(1, Math.min(6, digits)));
}

/** How far a displayed number may be from the true one; nothing if it is exact. */
function errorOf(picture: Picture, value: number): HTMLElement | null {
  return picture.error > 0 && Number.isFinite(value) ? element("span", { class: "error" }, ` ± ${short(picture.error, 2)}`) : null;
}
