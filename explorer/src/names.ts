/** Match names of modules against wildcards: the lower half of the site language (see sites.ts). */

export type Alternatives = string[][]; // The alternatives of one name, each cut at its `*`s.
export type Segments = (Alternatives | null)[]; // The alternatives of each name; null for `**`.

/** A `*` alone. */
export const ANY_NAME: Alternatives = [["", ""]];

/** Match names with two pointers; a `**` at the end matches at least one name, any other may match none. */
export function matchNames(names: string[], wanted: Segments): boolean {
  const segments = wanted.at(-1) === null ? [...wanted.slice(0, -1), ANY_NAME, null] : wanted;
  let name = 0;
  let segment = 0;
  let restart: [number, number] | null = null;
  while (name < names.length) {
    const here = segments[segment];
    if (here === null) {
      restart = [segment, name];
      segment += 1;
    } else if (here !== undefined && matchName(names[name]!, here)) {
      name += 1;
      segment += 1;
    } else if (restart !== null) {
      restart = [restart[0], restart[1] + 1];
      [segment, name] = [restart[0] + 1, restart[1]];
    } else {
      return false;
    }
  }
  return segments.slice(segment).every((left) => left === null);
}

/** Whether a name is one of the alternatives. */
export function matchName(name: string, alternatives: Alternatives): boolean {
  const [only, other] = alternatives;
  const any = other === undefined && only?.length === 2 && only.join("") === ""; // `*` alone also matches an empty name.
  return any || alternatives.some((pieces) => matchPieces(name, pieces));
}

/** Whether the pieces occur in this order, the first and last at the ends, with at least one character in each gap. */
function matchPieces(name: string, pieces: string[]): boolean {
  const first = pieces[0]!;
  const last = pieces.at(-1)!;
  if (pieces.length === 1) return name === first;
  if (!(name.startsWith(first) && name.endsWith(last))) return false;
  let position = first.length;
  for (const piece of pieces.slice(1, -1)) {
    position = name.indexOf(piece, position + 1);
    if (position < 0) return false;
    position += piece.length;
  }
  return position + 1 <= name.length - last.length;
}
