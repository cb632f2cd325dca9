/**
 * Colours for numbers: two colour maps that colour-blind readers can read, mixed in the Oklab space, where equal steps look equal.
 *
 * Zero has the colour of the background, light or dark, so that large values stand out. Values of both signs are blue
 * below zero and orange above; values of one sign grow darker on a light background and lighter on a dark one.
 */

import type { Picture } from "./picture";

export type Theme = "light" | "dark";

/** The range of numbers that the colours stand for. */
export interface Scale {
  low: number;
  high: number;
  diverging: boolean;
}

const ANCHORS: Record<Theme, { sequential: string[]; diverging: string[] }> = {
  light: {
    sequential: ["#f6f5f0", "#cfe0cf", "#86bdb6", "#3f88a9", "#2a4f8d", "#1d1745"],
    diverging: ["#0b3a75", "#2f74b5", "#94bfdf", "#f6f5f0", "#efb57c", "#cf6a1c", "#7c3206"],
  },
  dark: {
    sequential: ["#14171d", "#2b2c63", "#2d6199", "#2f9a98", "#93cf80", "#faf5b4"],
    diverging: ["#b5dcff", "#5ba3e6", "#265f9c", "#14171d", "#93501b", "#e58d3c", "#ffdcae"],
  },
};
const NOT_A_NUMBER: Record<Theme, string> = { light: "#d1006f", dark: "#ff4fa3" };
const INFINITE: Record<Theme, string> = { light: "#7a2fd0", dark: "#c48bff" };

const STEPS = 256;
const ramps = new Map<string, [number, number, number][]>();

/** The colour of one number, as CSS text. */
export function colourOf(value: number, scale: Scale, theme: Theme): string {
  const [red, green, blue] = mixed(value, scale, theme);
  return `rgb(${red} ${green} ${blue})`;
}

/** The colour of every code of a picture, as pixels. */
export function paletteOf(picture: Picture, scale: Scale, theme: Theme): Uint32Array {
  const bytes = new Uint8ClampedArray(4 * 256);
  for (let code = 0; code < 256; code += 1) bytes.set([...mixed(picture.valueOf(code), scale, theme), 255], 4 * code);
  return new Uint32Array(bytes.buffer);
}

/** Colours from one end of a scale to the other, for a legend. */
export function gradientOf(scale: Scale, theme: Theme): string {
  const stops = Array.from({ length: 25 }, (_, place) => {
    const value = scale.low + ((scale.high - scale.low) * place) / 24;
    return `${colourOf(value, scale, theme)} ${((100 * place) / 24).toFixed(1)}%`;
  });
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

function mixed(value: number, scale: Scale, theme: Theme): [number, number, number] {
  if (Number.isNaN(value)) return rgb(NOT_A_NUMBER[theme]);
  if (!Number.isFinite(value)) return rgb(INFINITE[theme]);
  const span = scale.high - scale.low;
  const place = span > 0 ? (value - scale.low) / span : scale.diverging ? 0.5 : 0;
  const ramp = rampOf(scale.diverging ? "diverging" : "sequential", theme);
  return ramp[Math.round(Math.min(1, Math.max(0, place)) * (STEPS - 1))]!;
}

function rampOf(kind: "sequential" | "diverging", theme: Theme): [number, number, number][] {
  const key = `${kind} ${theme}`;
  let ramp = ramps.get(key);
  if (!ramp) {
    const anchors = ANCHORS[theme][kind].map((colour) => toOklab(rgb(colour)));
    ramp = Array.from({ length: STEPS }, (_, step) => between(anchors, step / (STEPS - 1)));
    ramps.set(key, ramp);
  }
  return ramp;
}

function between(anchors: number[][], place: number): [number, number, number] {
  const at = place * (anchors.length - 1);
  const left = Math.min(Math.floor(at), anchors.length - 2);
  const share = at - left;
  return fromOklab(anchors[left]!.map((value, axis) => value + share * (anchors[left + 1]![axis]! - value)));
}

function rgb(colour: string): [number, number, number] {
  const number = Number.parseInt(colour.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

function toOklab([red, green, blue]: [number, number, number]): number[] {
  const [r, g, b] = [red, green, blue].map((part) => {
    const light = part / 255;
    return light <= 0.04045 ? light / 12.92 : ((light + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab(lab: number[]): [number, number, number] {
  const [lightness, a, b] = lab as [number, number, number];
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((light) => {
    const part = light <= 0.0031308 ? 12.92 * light : 1.055 * Math.max(0, light) ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, part)));
  }) as [number, number, number];
}
