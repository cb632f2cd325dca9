/** A picture on a canvas. It shows the number at the cursor, which the mouse or the arrow keys move. */

import { paletteOf, type Scale, type Theme } from "./colours";
import { element } from "./elements";
import type { Picture } from "./picture";
import { boxOf, cellAt, plan, type Cell, type Plan, type Subject } from "./plan";

/** The indices in the whole value that the reader points at. Runs of another shape may show them elsewhere, or not at all. */
export class Pointer {
  private readonly listeners: ((indices: number[] | null) => void)[] = [];

  onMove(listener: (indices: number[] | null) => void): void {
    this.listeners.push(listener);
  }

  move(indices: number[] | null): void {
    for (const listener of this.listeners) listener(indices);
  }
}

export interface PictureOptions {
  label: string; // For screen readers.
  subject: Subject;
  picture: Picture;
  place: (cell: Cell) => number; // Where a cell's number is in the picture.
  cell: (shown: number[]) => Cell | null; // The cell of the number with these indices.
  pointer: Pointer;
  tallest: number;
  choose: ((cell: Cell) => void) | null; // Called when a tile is clicked.
  explain: (cell: Cell, x: number, y: number) => void; // Shows the number under the cursor.
}

export class PictureView {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly mark = element("div", { class: "cell-mark", hidden: true });
  private made: Plan | null = null;
  private cell: Cell | null = null;
  private readonly strongest = new Map<number, Int32Array>(); // For each tile, the column that is drawn where several share a pixel.

  constructor(private readonly options: PictureOptions) {
    this.canvas = element("canvas", {
      class: options.choose ? "picture clickable" : "picture",
      tabindex: 0,
      role: "img",
      "aria-label": options.label,
      onmousemove: (event: MouseEvent) => this.point(this.under(event), event.clientX, event.clientY),
      onmouseleave: () => options.pointer.move(null),
      onblur: () => options.pointer.move(null),
      onclick: (event: MouseEvent) => this.choose(this.under(event)),
      onkeydown: (event: KeyboardEvent) => this.steer(event),
    });
    this.element = element("div", { class: "picture-frame" }, this.canvas, this.mark);
    options.pointer.onMove((indices) => {
      const shown = indices && options.picture.shownAt(indices);
      this.show(shown && options.cell(shown));
    });
  }

  /** Draw for a width, on a colour scale. */
  draw(width: number, scale: Scale, theme: Theme): void {
    const { subject, picture } = this.options;
    const made = plan(subject, width, this.options.tallest);
    const dense = window.devicePixelRatio || 1;
    this.made = made;
    this.strongest.clear();
    this.canvas.width = Math.round(made.width * dense);
    this.canvas.height = Math.round(made.height * dense);
    this.canvas.style.setProperty("width", `${made.width}px`);
    this.canvas.style.setProperty("height", `${made.height}px`);
    const context = this.canvas.getContext("2d")!;
    context.scale(dense, dense);
    context.imageSmoothingEnabled = false;
    const palette = paletteOf(picture, scale, theme);
    made.tiles.forEach((box, tile) => {
      const image = this.imageOf(tile, Math.round(box.width * dense), palette, scale);
      context.drawImage(image, box.x, box.y, box.width, box.height);
      context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--line");
      context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
    });
    this.write(context, made);
  }

  /** Draw one matrix with a pixel for each number; where columns have to share a pixel, the strongest value is drawn. */
  private imageOf(tile: number, pixels: number, palette: Uint32Array, scale: Scale): HTMLCanvasElement {
    const { subject, picture, place } = this.options;
    const columns = Math.max(1, Math.min(subject.columns, pixels));
    const middle = scale.diverging ? 0 : scale.low;
    const strength = Float64Array.from({ length: 256 }, (_, code) => {
      const value = Math.abs(picture.valueOf(code) - middle);
      return Number.isNaN(value) ? Infinity : value;
    });
    const image = new ImageData(columns, subject.rows);
    const target = new Uint32Array(image.data.buffer);
    const strongest = new Int32Array(columns * subject.rows);
    if (columns < subject.columns) this.strongest.set(tile, strongest);
    for (let row = 0; row < subject.rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const first = Math.floor((column * subject.columns) / columns);
        const end = Math.floor(((column + 1) * subject.columns) / columns);
        let best = first;
        for (let other = first + 1; other < end; other += 1) {
          const [here, there] = [place({ tile, row, column: other }), place({ tile, row, column: best })];
          if (strength[picture.code(here)]! > strength[picture.code(there)]!) best = other;
        }
        strongest[row * columns + column] = best;
        target[row * columns + column] = palette[picture.code(place({ tile, row, column: best }))]!;
      }
    }
    const canvas = element("canvas", { width: columns, height: subject.rows });
    canvas.getContext("2d")!.putImageData(image, 0, 0);
    return canvas;
  }

  private write(context: CanvasRenderingContext2D, made: Plan): void {
    const style = getComputedStyle(document.documentElement);
    context.textBaseline = "middle";
    for (const label of made.labels) {
      context.save();
      context.font = `${label.axis ? 11 : 10.5}px ${style.getPropertyValue(label.axis ? "--sans" : "--mono")}`;
      context.fillStyle = style.getPropertyValue(label.axis ? "--faint" : "--quiet");
      context.textAlign = label.align;
      context.translate(label.x, label.y);
      if (label.turned) context.rotate(-Math.PI / 2);
      context.fillText(label.text, 0, 0);
      context.restore();
    }
  }

  private under(event: MouseEvent): Cell | null {
    const frame = this.canvas.getBoundingClientRect();
    return this.made && cellAt(this.made, this.options.subject, event.clientX - frame.left, event.clientY - frame.top);
  }

  private point(under: Cell | null, x: number, y: number): void {
    const cell = under && this.drawnCell(under);
    this.options.pointer.move(cell && this.indicesOf(cell));
    if (cell) this.options.explain(cell, x, y);
  }

  /** The cell that is drawn at this cell's pixel, if several columns share it. */
  private drawnCell(cell: Cell): Cell {
    const { rows, columns } = this.options.subject;
    const strongest = this.strongest.get(cell.tile);
    if (!strongest) return cell;
    const across = strongest.length / rows;
    const pixel = Math.min(across - 1, Math.floor(((cell.column + 0.5) * across) / columns));
    return { ...cell, column: strongest[cell.row * across + pixel]! };
  }

  private indicesOf(cell: Cell): number[] {
    return this.options.picture.indicesOf(this.options.place(cell));
  }

  private show(cell: Cell | null): void {
    const box = cell && this.made && boxOf(this.made, this.options.subject, cell);
    this.cell = cell;
    this.mark.hidden = !box;
    if (!box) return;
    for (const [name, value] of Object.entries({ left: box.x, top: box.y, width: box.width, height: box.height })) {
      this.mark.style.setProperty(name, `${value}px`);
    }
  }

  private choose(cell: Cell | null): void {
    if (cell && this.options.choose) this.options.choose(cell);
  }

  /** Move over the cells with the arrow keys; Enter enlarges a tile, the page keys go through the tiles. */
  private steer(event: KeyboardEvent): void {
    const { rows, columns, tiles } = this.options.subject;
    const now = this.cell ?? { tile: 0, row: 0, column: 0 };
    const steps: Record<string, Partial<Cell>> = {
      ArrowLeft: { column: now.column - 1 },
      ArrowRight: { column: now.column + 1 },
      ArrowUp: { row: now.row - 1 },
      ArrowDown: { row: now.row + 1 },
      PageUp: { tile: now.tile - 1 },
      PageDown: { tile: now.tile + 1 },
    };
    if (event.key === "Enter") return this.choose(now);
    const step = steps[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const moved = this.cell ? { ...now, ...step } : now;
    const cell = {
      tile: Math.max(0, Math.min(tiles - 1, moved.tile)),
      row: Math.max(0, Math.min(rows - 1, moved.row)),
      column: Math.max(0, Math.min(columns - 1, moved.column)),
    };
    this.options.pointer.move(this.indicesOf(cell));
    const frame = this.canvas.getBoundingClientRect();
    const box = boxOf(this.made!, this.options.subject, cell)!;
    this.options.explain(cell, frame.left + box.x + box.width, frame.top + box.y + box.height);
  }
}
