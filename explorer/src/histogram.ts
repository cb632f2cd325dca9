/** Histograms of a value: a small one for a row of the tree, and a large one with both runs. */

import type { Histogram } from "./data";
import { drawn, element } from "./elements";
import { short, ticks } from "./numbers";
import { hideTip, showTip } from "./tip";

const SPARK = { width: 54, height: 16, bars: 32 };
const RUN = ["run-a", "run-b", "run-d"];

/** The histogram of the first run that has one, small enough for a row of the tree. */
export function spark(histograms: (Histogram | null)[]): SVGElement | null {
  const histogram = histograms.find((one) => one && one.counts.length);
  if (!histogram) return null;
  const counts = joined(histogram.counts, SPARK.bars);
  const most = Math.sqrt(Math.max(...counts, 1));
  const width = SPARK.width / counts.length;
  const path = counts.map((one, place) => {
    const height = Math.sqrt(one) / most * SPARK.height; // Square roots, so that tails can be seen next to a peak.
    return height ? `M${(place * width).toFixed(1)} ${SPARK.height}v${(-Math.max(height, 0.7)).toFixed(1)}h${width.toFixed(1)}V${SPARK.height}` : "";
  });
  return drawn("svg", { viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, height: SPARK.height, preserveAspectRatio: "none", class: "spark" }, drawn("path", { d: path.join("") }));
}

/** The histograms of the runs, drawn over each other on one axis; `log` makes small counts visible. */
export function histogramChart(histograms: (Histogram | null)[], names: string[], width: number, log: boolean): Element {
  const shown = histograms.map((histogram, run) => ({ histogram, run })).filter((one) => usable(one.histogram)) as Shown[];
  if (!shown.length) return element("p", { class: "empty" }, "There are no finite numbers to count.");
  const [height, left, bottom] = [150, 6, 20];
  const low = Math.min(...shown.map(({ histogram }) => histogram.low));
  const high = Math.max(...shown.map(({ histogram }) => histogram.high));
  const span = high - low || 1;
  const x = (value: number): number => left + ((value - low) / span) * (width - 2 * left);
  const densities = shown.map(({ histogram }) => densityOf(histogram, log));
  const most = Math.max(...densities.flat(), 1e-300);
  const y = (density: number): number => height - bottom - (density / most) * (height - bottom - 8);
  const chart = drawn("svg", { class: "chart", width, height, role: "img", "aria-label": describe(shown, names) });
  for (const tick of ticks(low, high, Math.floor(width / 90))) {
    chart.append(
      drawn("line", { class: tick === 0 ? "grid zero" : "grid", x1: x(tick), x2: x(tick), y1: 4, y2: height - bottom }),
      drawn("text", { class: "tick", x: Math.max(left + 8, Math.min(width - 12, x(tick))), y: height - 5, "text-anchor": "middle" }, short(tick)),
    );
  }
  shown.forEach(({ histogram, run }, place) => {
    chart.append(drawn("path", { class: `area ${RUN[run]}`, d: steps(histogram, densities[place]!, x, y, height - bottom) }));
  });
  chart.append(drawn("line", { class: "axis", x1: left, x2: width - left, y1: height - bottom, y2: height - bottom }));
  chart.addEventListener("mousemove", (event) => {
    const value = low + ((event.clientX - chart.getBoundingClientRect().left - left) / (width - 2 * left)) * span;
    showTip(event.clientX, event.clientY, shown.map(({ histogram, run }) => countAt(histogram, names[run] ?? "", value, RUN[run]!)));
  });
  chart.addEventListener("mouseleave", hideTip);
  return chart;
}

interface Shown {
  histogram: Histogram;
  run: number;
}

function usable(histogram: Histogram | null): boolean {
  return histogram !== null && histogram.counts.length > 0 && Number.isFinite(histogram.high - histogram.low);
}

function describe(shown: Shown[], names: string[]): string {
  const ranges = shown.map(({ histogram, run }) => `${names[run]}: from ${short(histogram.low)} to ${short(histogram.high)}`);
  return `Histogram. ${ranges.join("; ")}`;
}

function densityOf(histogram: Histogram, log: boolean): number[] {
  const width = (histogram.high - histogram.low) / histogram.counts.length || 1;
  const total = histogram.counts.reduce((sum, one) => sum + one, 0) || 1;
  return histogram.counts.map((one) => (log ? Math.log10(1 + one) : one / total / width));
}

function steps(histogram: Histogram, densities: number[], x: (value: number) => number, y: (density: number) => number, base: number): string {
  const width = (histogram.high - histogram.low || 1) / densities.length;
  const points = densities.map((density, bin) => {
    const start = histogram.low + bin * width;
    return `L${x(start).toFixed(1)} ${y(density).toFixed(1)}L${x(start + width).toFixed(1)} ${y(density).toFixed(1)}`;
  });
  return `M${x(histogram.low).toFixed(1)} ${base}${points.join("")}L${x(histogram.low + width * densities.length).toFixed(1)} ${base}Z`;
}

function countAt(histogram: Histogram, name: string, value: number, run: string): Element {
  const width = (histogram.high - histogram.low) / histogram.counts.length || 1;
  const bin = Math.min(histogram.counts.length - 1, Math.floor((value - histogram.low) / width));
  const inside = bin >= 0 && value <= histogram.high;
  const from = histogram.low + bin * width;
  const text = inside ? `${histogram.counts[bin]!.toLocaleString("en-US")} in ${short(from)} … ${short(from + width)}` : "none";
  return element("div", { class: "tip-line" }, element("span", { class: `swatch ${run}` }), element("span", { class: "tip-name" }, name), element("b", {}, text));
}

function joined(counts: number[], most: number): number[] {
  const every = Math.max(1, Math.ceil(counts.length / most));
  const bars = Array.from({ length: Math.ceil(counts.length / every) }, () => 0);
  counts.forEach((one, place) => (bars[Math.floor(place / every)]! += one));
  return bars;
}
