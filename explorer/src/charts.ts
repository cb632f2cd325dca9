/** Lines and bars over many sites: each point names its site and links to it. */

import { drawn, element } from "./elements";
import { short, ticks } from "./numbers";
import { hideTip, showTip } from "./tip";

export interface Line {
  name: string;
  colour: string; // A class of style.css.
  values: (number | null)[];
}

export interface LineChart {
  label: string;
  names: string[]; // The names of the places along the axis.
  lines: Line[];
  width: number;
  height: number;
  log: boolean;
  choose: (place: number) => void;
}

const LEFT = 58;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 24;
const LONGEST = 20; // The most letters of a name along the axis.
const LETTER = 6.6; // The width of a letter.
const GAP = 16;

/** Lines of numbers over places, which the mouse or the left and right arrow keys point at. */
export function lineChart(options: LineChart): Element {
  const { names, lines, width, height } = options;
  const numbers = lines.flatMap((line) => line.values).filter((value): value is number => value !== null && Number.isFinite(value));
  const usable = options.log ? numbers.filter((value) => value > 0) : numbers;
  if (!usable.length) return element("p", { class: "empty" }, "There are no finite numbers to draw.");
  const axis = axisOf(usable, options.log, height);
  const x = (place: number): number => LEFT + (names.length > 1 ? (place / (names.length - 1)) * (width - LEFT - RIGHT) : (width - LEFT - RIGHT) / 2);
  const chart = drawn("svg", { class: "chart line-chart", width, height, tabindex: 0, role: "img", "aria-label": options.label });
  for (const { at, text } of axis.ticks) {
    chart.append(
      drawn("line", { class: text === "0" ? "grid zero" : "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      drawn("text", { class: "tick", x: LEFT - 8, y: at + 3.5, "text-anchor": "end" }, text),
    );
  }
  chart.append(...placeNames(names, x, width, height));
  const cursor = drawn("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  chart.append(cursor);
  for (const line of lines) {
    chart.append(drawn("path", { class: `line ${line.colour}`, d: pathOf(line.values, x, axis.y, options.log) }));
    if (names.length > 80) continue;
    line.values.forEach((value, place) => {
      if (drawable(value, options.log)) chart.append(drawn("circle", { class: `point ${line.colour}`, cx: x(place), cy: axis.y(value), r: names.length > 40 ? 2 : 2.6 }));
    });
  }
  follow(chart, options, cursor, x);
  return chart;
}

interface Axis {
  y: (value: number) => number;
  ticks: { at: number; text: string }[];
}

function axisOf(numbers: number[], log: boolean, height: number): Axis {
  let [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  if (log) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    const room = Math.max(0.1, (high - low) * 0.06);
    [low, high] = [low - room, high + room];
  } else {
    if (low > 0 && low < high * 0.6) low = 0;
    if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    const room = (high - low) * 0.04;
    [low, high] = [low === 0 ? 0 : low - room, high + room];
  }
  const y = (value: number): number => {
    const place = ((log ? Math.log10(value) : value) - low) / (high - low);
    return height - BOTTOM - place * (height - TOP - BOTTOM);
  };
  const marks = log ? decades(low, high) : ticks(low, high, Math.floor(height / 44));
  return { y, ticks: marks.map((mark) => ({ at: y(mark), text: short(mark, 3) })) };
}

function decades(low: number, high: number): number[] {
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const whole: number[] = [];
  for (let power = Math.ceil(low); power <= high; power += every) whole.push(10 ** power);
  if (whole.length > 1) return whole;
  return ticks(10 ** low, 10 ** high, 4).filter((mark) => mark > 0);
}

/** Names along the axis, evenly spaced: as many as there is room for. */
function placeNames(names: string[], x: (place: number) => number, width: number, height: number): Element[] {
  const texts = names.map((name) => (name.length > LONGEST ? `…${name.slice(1 - LONGEST)}` : name));
  const wide = LETTER * Math.max(...texts.map((text) => text.length));
  const step = names.length > 1 ? x(1) - x(0) : width;
  const every = Math.max(1, Math.ceil((wide + GAP) / step));
  let free = 0; // Where the next name may begin.
  return texts.flatMap((text, place) => {
    const half = (LETTER * text.length) / 2;
    const at = Math.max(half, Math.min(x(place), width - half)); // The first and the last name stay inside the chart.
    if (place % every || at - half < free) return [];
    free = at + half + GAP / 2;
    return [drawn("text", { class: "tick name", x: at, y: height - 7, "text-anchor": "middle" }, text)];
  });
}

function drawable(value: number | null | undefined, log: boolean): value is number {
  return value !== null && value !== undefined && Number.isFinite(value) && (!log || value > 0);
}

/** A line with a gap wherever there is no number. */
function pathOf(values: (number | null)[], x: (place: number) => number, y: (value: number) => number, log: boolean): string {
  let pen = "M";
  const parts = values.map((value, place) => {
    if (!drawable(value, log)) {
      pen = "M";
      return "";
    }
    const part = `${pen}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
    return part;
  });
  return parts.join("");
}

function follow(chart: SVGSVGElement, options: LineChart, cursor: SVGLineElement, x: (place: number) => number): void {
  const { names, lines, width } = options;
  let now = -1;
  const show = (place: number, left: number, top: number): void => {
    now = Math.max(0, Math.min(names.length - 1, place));
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", String(x(now)));
    cursor.setAttribute("x2", String(x(now)));
    const rows = lines.map((line) => {
      const value = line.values[now];
      const text = value === null || value === undefined ? "none" : short(value, 6);
      return element("div", { class: "tip-line" }, element("span", { class: `swatch ${line.colour}` }), element("span", { class: "tip-name" }, line.name), element("b", {}, text));
    });
    showTip(left, top, element("div", { class: "tip-title" }, names[now]!), rows);
  };
  const hide = (): void => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
  chart.addEventListener("mousemove", (event) => {
    const at = event.clientX - chart.getBoundingClientRect().left;
    show(Math.round(((at - LEFT) / (width - LEFT - RIGHT)) * (names.length - 1)), event.clientX, event.clientY);
  });
  chart.addEventListener("mouseleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("click", () => now >= 0 && options.choose(now));
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && now >= 0) options.choose(now);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.altKey || event.metaKey || event.ctrlKey) return;
    event.preventDefault();
    const frame = chart.getBoundingClientRect();
    const next = now < 0 ? 0 : now + step;
    show(next, frame.left + x(Math.max(0, Math.min(names.length - 1, next))), frame.top + 30);
  });
}

/** Bars with their names and numbers, and a mark at the value without any change. */
export function barChart(rows: { name: string; value: number; choose: (() => void) | null }[], base: number | null): Element {
  const finite = [...rows.map((row) => row.value), base ?? 0].filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
  const span = high - low || 1;
  const share = (value: number): string => `${((100 * (value - low)) / span).toFixed(2)}%`;
  const lines = rows.map((row) => {
    const value = Number.isFinite(row.value) ? row.value : 0;
    const bar = element("span", { class: "bar", style: { left: share(Math.min(0, value)), width: `${((100 * Math.abs(value)) / span).toFixed(2)}%` } });
    const mark = base !== null && Number.isFinite(base) ? element("span", { class: "base", style: { left: share(base) } }) : null;
    const name = row.choose ? element("button", { class: "link mono", onclick: row.choose }, row.name) : element("span", { class: "mono" }, row.name);
    return element("li", {}, element("span", { class: "bar-name", title: row.name }, name), element("span", { class: "bar-room" }, bar, mark), element("span", { class: "bar-value" }, short(row.value)));
  });
  return element("ul", { class: "bars" }, lines);
}
