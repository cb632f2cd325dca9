/** A value as the page stores it: a one-byte code for each displayed number, and the numbers that the codes stand for. */

import { PageError, type Packed } from "./data";
import type { Scale } from "./colours";

const MINUS_INFINITE = 253;
const PLUS_INFINITE = 254;

export class Picture {
  readonly shape: number[];
  readonly of: number[];
  readonly pick: Packed["pick"];
  readonly leftOut: string;
  readonly error: number; // The largest difference between a displayed number and the true one.
  private readonly levels: Float32Array;
  private readonly codes: Uint8Array;

  constructor(packed: Packed) {
    this.shape = packed.shape;
    this.of = packed.of;
    this.pick = packed.pick;
    this.leftOut = packed.left_out;
    this.error = packed.error;
    const levels = bytesOf(packed.levels);
    this.levels = new Float32Array(levels.buffer, 0, levels.length >> 2);
    this.codes = bytesOf(packed.codes);
    const wanted = packed.shape.reduce((product, size) => product * size, 1);
    if (this.codes.length !== wanted) {
      throw new PageError(`This picture is damaged: ${this.codes.length} of ${wanted} numbers are there.`);
    }
  }

  /** The code at a flat index. */
  code(place: number): number {
    return this.codes[place]!;
  }

  /** The number that a code stands for. */
  valueOf(code: number): number {
    if (code < this.levels.length) return this.levels[code]!;
    return code === MINUS_INFINITE ? -Infinity : code === PLUS_INFINITE ? Infinity : NaN;
  }

  value(place: number): number {
    return this.valueOf(this.codes[place]!);
  }

  /** The flat index of these indices. */
  place(...indices: number[]): number {
    return indices.reduce((place, index, dimension) => place * this.shape[dimension]! + index, 0);
  }

  /** The index in the whole value for an index in the picture. */
  trueIndex(dimension: number, index: number): number {
    const [start, , step] = this.pick[dimension] ?? [0, 0, 1];
    return start + index * step;
  }

  /** The indices in the whole value for a flat index in the picture. */
  indicesOf(place: number): number[] {
    const shown: number[] = [];
    for (let rest = place, dimension = this.shape.length - 1; dimension >= 0; dimension -= 1) {
      shown.unshift(rest % this.shape[dimension]!);
      rest = Math.floor(rest / this.shape[dimension]!);
    }
    return shown.map((index, dimension) => this.trueIndex(dimension, index));
  }

  /** The indices in the picture for indices of the whole value; null if the picture does not have them. */
  shownAt(indices: number[]): number[] | null {
    const shown = indices.map((index, dimension) => {
      const [start, , step] = this.pick[dimension] ?? [0, 0, 1];
      return (index - start) / step;
    });
    const there = shown.length === this.shape.length && shown.every((index, dimension) => Number.isInteger(index) && index >= 0 && index < this.shape[dimension]!);
    return there ? shown : null;
  }

  /** How often each code occurs. */
  counts(): Uint32Array {
    const counts = new Uint32Array(256);
    for (const code of this.codes) counts[code]! += 1;
    return counts;
  }
}

/** The scale that covers this share of the numbers in these pictures; numbers beyond it get the colour of its end. `fromZero` starts it at 0. */
export function scaleOf(pictures: Picture[], share: number, fromZero = false): Scale {
  const numbers: [value: number, count: number][] = [];
  for (const picture of pictures) {
    picture.counts().forEach((count, code) => {
      const value = picture.valueOf(code);
      if (count && Number.isFinite(value)) numbers.push([value, count]);
    });
  }
  if (!numbers.length) return { low: 0, high: 1, diverging: false };
  if (numbers.some(([value]) => value < 0)) {
    const limit = quantile(numbers.map(([value, count]) => [Math.abs(value), count]), share) || 1;
    return { low: -limit, high: limit, diverging: true };
  }
  const high = quantile(numbers, share);
  const low = quantile(numbers, 1 - share);
  return { low: !fromZero && low > high / 2 && low < high ? low : 0, high: high || 1, diverging: false };
}

function quantile(numbers: [value: number, count: number][], share: number): number {
  const sorted = numbers.toSorted(([one], [other]) => one - other);
  const wanted = share * sorted.reduce((total, [, count]) => total + count, 0);
  let seen = 0;
  for (const [value, count] of sorted) {
    seen += count;
    if (seen >= wanted) return value;
  }
  return sorted.at(-1)![0];
}

function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
  return bytes;
}
