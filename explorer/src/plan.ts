/** The layout of a picture: tiles of rows and columns, with names along the edges. Independent of the canvas. */

/** The matrices to show, all of one size. */
export interface Subject {
  tiles: number;
  rows: number;
  columns: number;
  tileName: (tile: number) => string;
  rowName: ((row: number) => string) | null;
  rowIndex: (row: number) => number; // The row's index in the whole value, of which only some rows may be shown.
  columnIndex: (column: number) => number;
  columnName: ((column: number) => string) | null;
  rowAxis: string;
  columnAxis: string;
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Label {
  x: number;
  y: number;
  text: string;
  align: "left" | "right" | "center";
  turned: boolean;
  axis: boolean; // True for the name of an axis, false for that of a row or column.
}

export interface Plan {
  width: number;
  height: number;
  tiles: Box[];
  labels: Label[];
}

/** A cell of a picture: which matrix, row and column. */
export interface Cell {
  tile: number;
  row: number;
  column: number;
}

const GAP = 10;
const CAPTION = 18;
const CHARACTER = 6.2; // The approximate width of a character in the labels.
const LONGEST_LABEL = 14;

/** Lay out the matrices within a width: several in a grid, or a single one with its axes. */
export function plan(subject: Subject, width: number, tallest: number): Plan {
  return subject.tiles > 1 ? gridOf(subject, width, tallest) : singleOf(subject, width, tallest);
}

/** The cell at a point of the picture. */
export function cellAt(made: Plan, subject: Subject, x: number, y: number): Cell | null {
  const tile = made.tiles.findIndex((box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height);
  if (tile < 0) return null;
  const box = made.tiles[tile]!;
  const row = Math.floor(((y - box.y) / box.height) * subject.rows);
  const column = Math.floor(((x - box.x) / box.width) * subject.columns);
  return { tile, row: Math.min(row, subject.rows - 1), column: Math.min(column, subject.columns - 1) };
}

/** The position and size of a cell. */
export function boxOf(made: Plan, subject: Subject, cell: Cell): Box | null {
  const box = made.tiles[cell.tile];
  if (!box) return null;
  const [width, height] = [box.width / subject.columns, box.height / subject.rows];
  return { x: box.x + cell.column * width, y: box.y + cell.row * height, width, height };
}

/** A grid of the largest tiles that fit; if none fit, of small tiles, in a picture as tall as needed. */
function gridOf(subject: Subject, width: number, tallest: number): Plan {
  const ratio = subject.rows / subject.columns;
  const smallest = Math.min(44, width);
  let [across, size] = [1, width];
  for (across = 1; across <= subject.tiles; across += 1) {
    size = tileSize((width - 2 - GAP * (across - 1)) / across, subject);
    const down = Math.ceil(subject.tiles / across);
    const next = (width - GAP * across) / (across + 1);
    if (down * (size * ratio + CAPTION + GAP) <= tallest || next < smallest) break;
  }
  across = Math.min(across, subject.tiles);
  const height = Math.max(1, size * ratio);
  const pitch = across > 1 ? Math.min((width - 2 - size) / (across - 1), size * 1.1 + GAP) : 0;
  const tiles: Box[] = [];
  const labels: Label[] = [];
  for (let tile = 0; tile < subject.tiles; tile += 1) {
    const x = Math.round((tile % across) * pitch) + 1;
    const y = Math.floor(tile / across) * (height + CAPTION + GAP) + CAPTION;
    tiles.push({ x, y, width: size, height });
    labels.push({ x, y: y - 8, text: cut(subject.tileName(tile), size / CHARACTER), align: "left", turned: false, axis: false });
  }
  return { width, height: Math.ceil(tiles.at(-1)!.y + height + 1), tiles, labels };
}

/** The width of a tile: whole pixels for each number if there is room, so that all cells have one size; half pixels for small cells. */
function tileSize(room: number, subject: Subject): number {
  const wanted = Math.min(room, 240);
  const scale = wanted / subject.columns;
  const even = scale >= 3 ? Math.floor(scale) : Math.floor(2 * scale) / 2;
  return Math.max(4, scale >= 1 ? even * subject.columns : wanted);
}

/** One matrix, as large as the width allows, with names for its rows and columns. */
function singleOf(subject: Subject, width: number, tallest: number): Plan {
  const left = Math.ceil(gutter(subject.rowName, subject.rows)) + 22;
  const top = subject.columnName ? Math.ceil(gutter(subject.columnName, subject.columns) * 0.95) + 28 : 6;
  const bottom = subject.columnName ? 8 : 34;
  const room = Math.max(40, width - left - 4);
  const named = subject.rowName !== null && subject.columnName !== null;
  const cell = Math.min(room / subject.columns, named ? 34 : Infinity);
  const even = cell >= 1 && (named || subject.rowAxis === "row") ? Math.floor(cell) : cell;
  const rowHeight = rowHeightOf(subject, even, tallest);
  const box = { x: left, y: top, width: even * subject.columns, height: rowHeight * subject.rows };
  const labels = [...rowLabels(subject, box), ...columnLabels(subject, box, top)];
  return { width, height: Math.ceil(top + box.height + bottom), tiles: [box], labels };
}

function rowHeightOf(subject: Subject, cell: number, tallest: number): number {
  if (subject.rowName && subject.columnName) return cell; // Square cells, as for attention.
  if (subject.rowName) return Math.max(subject.rows > 60 ? 6 : 12, Math.min(22, tallest / subject.rows));
  if (subject.rowAxis === "row") return cell; // An image.
  return Math.max(3, Math.min(22, tallest / subject.rows));
}

function gutter(name: ((place: number) => string) | null, count: number): number {
  if (!name) return 4 * CHARACTER;
  let longest = 1;
  for (let place = 0; place < count; place += 1) longest = Math.max(longest, cut(name(place), LONGEST_LABEL).length);
  return longest * CHARACTER;
}

function rowLabels(subject: Subject, box: Box): Label[] {
  const size = box.height / subject.rows;
  const every = Math.max(1, Math.ceil(11 / size));
  const name = subject.rowName ?? ((row: number) => String(subject.rowIndex(row)));
  const places = subject.rowName ? range(subject.rows, every) : spread(subject.rows, Math.floor(box.height / 40));
  const labels = places.map((row) => ({
    x: box.x - 7,
    y: box.y + (row + 0.5) * size,
    text: cut(name(row), LONGEST_LABEL),
    align: "right" as const,
    turned: false,
    axis: false,
  }));
  return [...labels, { x: 8, y: box.y + box.height / 2, text: subject.rowAxis, align: "center", turned: true, axis: true }];
}

function columnLabels(subject: Subject, box: Box, top: number): Label[] {
  const size = box.width / subject.columns;
  const named = subject.columnName;
  const places = named ? range(subject.columns, Math.max(1, Math.ceil(11 / size))) : spread(subject.columns, Math.floor(box.width / 80));
  const labels: Label[] = places.map((column) => ({
    x: box.x + (column + 0.5) * size,
    y: named ? top - 6 : box.y + box.height + 11,
    text: named ? cut(named(column), LONGEST_LABEL) : String(subject.columnIndex(column)),
    align: named ? "left" : "center",
    turned: named !== null,
    axis: false,
  }));
  const y = named ? 7 : box.y + box.height + 27;
  return [...labels, { x: box.x + box.width / 2, y, text: subject.columnAxis, align: "center", turned: false, axis: true }];
}

function range(count: number, every: number): number[] {
  return Array.from({ length: Math.ceil(count / every) }, (_, place) => place * every);
}

/** Places at round numbers (0, 50, 100, ...), about `most` of them. */
function spread(count: number, most: number): number[] {
  const rough = count / Math.max(2, most);
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10));
  return range(count, step);
}

function cut(text: string, most: number): string {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, Math.max(1, Math.floor(most) - 1)).join("")}…` : text;
}
