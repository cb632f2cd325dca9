/** Values of single units as bars: a vector, a number, or one sample of a batch of vectors. */

import { runNames, type App } from "./app";
import type { Site } from "./data";
import { drawn, element } from "./elements";
import { short, ticks } from "./numbers";
import { tipLines } from "./panels";
import type { Picture } from "./picture";
import { hideTip, showTip } from "./tip";

const HEIGHT = 150;
const LEFT = 52;
const RUN = ["run-a", "run-b", "run-d"];

/** Draw the units of one run as bars on the axis that all runs share. */
export function barsView(app: App, site: Site, pictures: (Picture | null)[], run: number, width: number): Element {
  const picture = pictures[run]!;
  const dimension = site.kind === "units" ? 1 : 0;
  const samples = site.kind === "units" ? (picture.shape[0] ?? 1) : 1;
  const sample = Math.min(app.state.sample, samples - 1);
  if (site.kind === "number") return element("p", { class: "number" }, short(picture.value(0), 7));
  const units = picture.shape[dimension] ?? 1;
  const comparable = run < 2 ? pictures.slice(0, 2) : [picture];
  const finite = comparable.flatMap((one) => (one ? valuesOf(one, sample, one.shape[dimension] ?? 1) : [])).filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
  const span = high - low || 1;
  const y = (value: number): number => 8 + ((high - value) / span) * (HEIGHT - 32);
  const step = (width - LEFT - 4) / units;
  const label = `${site.name}, ${runNames(app.page)[run]}: ${units} units as bars`;
  const chart = drawn("svg", { class: "chart", width, height: HEIGHT, tabindex: 0, role: "img", "aria-label": label });
  for (const tick of ticks(low, high, 4)) {
    chart.append(
      drawn("line", { class: tick === 0 ? "grid zero" : "grid", x1: LEFT, x2: width - 4, y1: y(tick), y2: y(tick) }),
      drawn("text", { class: "tick", x: LEFT - 7, y: y(tick) + 3.5, "text-anchor": "end" }, short(tick, 3)),
    );
  }
  const values = valuesOf(picture, sample, units);
  const gap = step > 4 ? 1 : 0;
  const bars = values.map((value, unit) => {
    const shown = Number.isFinite(value) ? value : 0;
    return `M${(LEFT + unit * step).toFixed(2)} ${y(0).toFixed(1)}V${y(shown).toFixed(1)}h${Math.max(0.5, step - gap).toFixed(2)}V${y(0).toFixed(1)}`;
  });
  chart.append(drawn("path", { class: `bar-path ${RUN[run]}`, d: bars.join("") }));
  for (const unit of ticks(0, units - 1, Math.min(units, Math.floor(width / 60))).filter(Number.isInteger)) {
    chart.append(drawn("text", { class: "tick", x: LEFT + (unit + 0.5) * step, y: HEIGHT - 6, "text-anchor": "middle" }, String(picture.trueIndex(dimension, unit))));
  }
  follow(chart, (unit) => tipOf(app, pictures, picture, dimension ? picture.place(sample, unit) : unit), units, step);
  return samples > 1 ? element("div", {}, element("p", { class: "bars-title" }, `sample ${picture.trueIndex(0, sample)}`), chart) : chart;
}

function valuesOf(picture: Picture, sample: number, units: number): number[] {
  const first = picture.shape.length > 1 ? picture.place(Math.min(sample, picture.shape[0]! - 1), 0) : 0;
  return Array.from({ length: units }, (_, unit) => picture.value(first + unit));
}

function tipOf(app: App, pictures: (Picture | null)[], picture: Picture, place: number): Element[] {
  const indices = picture.indicesOf(place);
  return [element("div", { class: "tip-title" }, `unit ${indices.at(-1)}`), ...tipLines(app, pictures, indices)];
}

function follow(chart: SVGSVGElement, tip: (unit: number) => Element[], units: number, step: number): void {
  let now = -1;
  const show = (unit: number, x: number, y: number): void => {
    now = Math.max(0, Math.min(units - 1, unit));
    showTip(x, y, tip(now));
  };
  chart.addEventListener("mousemove", (event) => {
    show(Math.floor((event.clientX - chart.getBoundingClientRect().left - LEFT) / step), event.clientX, event.clientY);
  });
  chart.addEventListener("mouseleave", hideTip);
  chart.addEventListener("blur", hideTip);
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const frame = chart.getBoundingClientRect();
    show(now + by, frame.left + LEFT + (now + by) * step, frame.top + 20);
  });
}
