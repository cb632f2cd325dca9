/** What each kind of value shows: which dimensions are rows, columns and tiles, and how to describe a place in words. */

import type { Page } from "./data";
import type { Picture } from "./picture";
import type { Cell, Subject } from "./plan";

/** A picture of one sample: the matrices to draw, and where their numbers are. */
export interface Shown {
  subject: Subject;
  place: (cell: Cell) => number;
  cell: (shown: number[]) => Cell | null; // The cell of the number with these indices; null if it is not drawn.
  explain: (cell: Cell) => string[]; // The place in words: "head 3", "query 5 “ cat”", ...
  tileNoun: string; // The name of a tile that can be enlarged, or "".
}

/** The part of a picture to draw; null if this kind of value has no matrix. */
export function shownOf(page: Page, kind: string, picture: Picture, sample: number, tile: number | null): Shown | null {
  const samples = new Samples(page, picture, Math.min(sample, (picture.shape[0] ?? 1) - 1));
  if (kind === "maps") return mapsOf(samples, tile);
  if (kind === "attention") return headsOf(samples, tile);
  if (kind === "tokens") return tokensOf(samples);
  if (kind === "units") return unitsOf(samples);
  return null;
}

/** How many samples of a value the reader can choose from. */
export function sampleCount(kind: string, picture: Picture): number {
  return ["maps", "attention", "tokens", "units"].includes(kind) ? (picture.shape[0] ?? 1) : 1;
}

class Samples {
  constructor(
    private readonly page: Page,
    readonly picture: Picture,
    readonly sample: number,
  ) {}

  size(dimension: number): number {
    return this.picture.shape[dimension] ?? 1;
  }

  index(dimension: number, shown: number): number {
    return this.picture.trueIndex(dimension, shown);
  }

  get sampleName(): string {
    return `sample ${this.index(0, this.sample)}`;
  }

  /** The names of the tokens along a dimension; null if the page does not have those of this sample. */
  tokens(dimension: number): ((shown: number) => string) | null {
    const words = this.page.tokens?.[this.sample] ?? null;
    if (!words || words.length !== this.picture.of[dimension]) return null;
    return (shown) => words[this.index(dimension, shown)] ?? "";
  }

  /** A token in words: `query 3 “ cat”`. */
  token(noun: string, dimension: number, shown: number): string {
    const name = this.tokens(dimension);
    return `${noun} ${this.index(dimension, shown)}${name ? ` “${name(shown)}”` : ""}`;
  }
}

function mapsOf(samples: Samples, tile: number | null): Shown {
  const channel = (shown: number): number => (tile === null ? shown : tile);
  const subject = {
    tiles: tile === null ? samples.size(1) : 1,
    rows: samples.size(2),
    columns: samples.size(3),
    rowIndex: (row: number) => samples.index(2, row),
    columnIndex: (column: number) => samples.index(3, column),
    tileName: (shown: number) => String(samples.index(1, shown)),
    rowName: null,
    columnName: null,
    rowAxis: "row",
    columnAxis: "column",
  };
  return {
    subject,
    tileNoun: "channel",
    place: (cell) => samples.picture.place(samples.sample, channel(cell.tile), cell.row, cell.column),
    cell: (shown) => tiledCell(samples, tile, shown),
    explain: (cell) => [
      samples.sampleName,
      `channel ${samples.index(1, channel(cell.tile))}`,
      `row ${samples.index(2, cell.row)}`,
      `column ${samples.index(3, cell.column)}`,
    ],
  };
}

/** The cell of a number in a grid of tiles, or in the enlarged tile; null if it is not shown. */
function tiledCell(samples: Samples, tile: number | null, [sample, at, row, column]: number[]): Cell | null {
  if (sample !== samples.sample || (tile !== null && at !== tile)) return null;
  return { tile: tile === null ? at! : 0, row: row!, column: column! };
}

function headsOf(samples: Samples, tile: number | null): Shown {
  const head = (shown: number): number => (tile === null ? shown : tile);
  const named = (dimension: number): ((shown: number) => string) => samples.tokens(dimension) ?? ((shown) => String(samples.index(dimension, shown)));
  const subject = {
    tiles: tile === null ? samples.size(1) : 1,
    rows: samples.size(2),
    columns: samples.size(3),
    rowIndex: (row: number) => samples.index(2, row),
    columnIndex: (column: number) => samples.index(3, column),
    tileName: (shown: number) => `head ${samples.index(1, shown)}`,
    rowName: named(2),
    columnName: named(3),
    rowAxis: "query",
    columnAxis: "key",
  };
  return {
    subject,
    tileNoun: "head",
    place: (cell) => samples.picture.place(samples.sample, head(cell.tile), cell.row, cell.column),
    cell: (shown) => tiledCell(samples, tile, shown),
    explain: (cell) => [
      samples.sampleName,
      `head ${samples.index(1, head(cell.tile))}`,
      samples.token("query", 2, cell.row),
      samples.token("key", 3, cell.column),
    ],
  };
}

function tokensOf(samples: Samples): Shown {
  const subject = {
    tiles: 1,
    rows: samples.size(1),
    columns: samples.size(2),
    rowIndex: (row: number) => samples.index(1, row),
    columnIndex: (column: number) => samples.index(2, column),
    tileName: () => "",
    rowName: samples.tokens(1),
    columnName: null,
    rowAxis: "token",
    columnAxis: unitAxis(samples, 2),
  };
  return {
    subject,
    tileNoun: "",
    place: (cell) => samples.picture.place(samples.sample, cell.row, cell.column),
    cell: ([sample, row, column]) => (sample === samples.sample ? { tile: 0, row: row!, column: column! } : null),
    explain: (cell) => [samples.sampleName, samples.token("token", 1, cell.row), `unit ${samples.index(2, cell.column)}`],
  };
}

function unitsOf(samples: Samples): Shown {
  const subject = {
    tiles: 1,
    rows: samples.size(0),
    columns: samples.size(1),
    rowIndex: (row: number) => samples.index(0, row),
    columnIndex: (column: number) => samples.index(1, column),
    tileName: () => "",
    rowName: null,
    columnName: null,
    rowAxis: "sample",
    columnAxis: unitAxis(samples, 1),
  };
  return {
    subject,
    tileNoun: "",
    place: (cell) => samples.picture.place(cell.row, cell.column),
    cell: ([row, column]) => ({ tile: 0, row: row!, column: column! }),
    explain: (cell) => [`sample ${samples.index(0, cell.row)}`, `unit ${samples.index(1, cell.column)}`],
  };
}

function unitAxis(samples: Samples, dimension: number): string {
  const step = samples.picture.pick[dimension]?.[2] ?? 1;
  return step > 1 ? `unit (every ${ordinal(step)})` : "unit";
}

function ordinal(number: number): string {
  const ends: Record<number, string> = { 1: "st", 2: "nd", 3: "rd" };
  return `${number}${(Math.floor(number / 10) % 10 !== 1 && ends[number % 10]) || "th"}`;
}
