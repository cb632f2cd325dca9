/** Tokens as a subscript: `@17`, `@3:9`, `@prompt[-1]`, `@new`, `@(3, 5)`. This is `_values/tokens.py` in TypeScript. */

import { ENDS, integer, matchAt, SPACE } from "./reading";

const BOUND = `${SPACE}*(-?\\p{Nd}{1,10})?${SPACE}*`;
const SPAN = `${BOUND}(:)?${BOUND}(?:(:)${BOUND})?`;
const NAMED = new RegExp(`@${SPACE}*(prompt|new)(?:${SPACE}*\\[${SPAN}\\])?`, "uy");
const INDEXED = new RegExp(`@()${SPAN}`, "uy");
const INSIDE = `(?:[\\p{Nd},():|]|${SPACE})*`;
const ROWS = new RegExp(`@${SPACE}*(\\(|mask\\()(${INSIDE})\\)`, "uy");
const NUMBERS = `(?:[\\p{Nd},]|${SPACE})*`;
const MOST_COLUMNS = 1 << 24;

/** Tokens of a sequence. Two texts that mean the same tokens have the same canonical text. */
export class Tokens {
  constructor(readonly text: string) {}
}

/** Read the tokens that a text names from its `@` on. Return them, where they end, and what is wrong otherwise. */
export function readTokens(text: string, position: number): [Tokens | null, number, string] {
  const rows = matchAt(ROWS, text, position);
  if (rows) {
    const found = rows[1] === "mask(" ? maskOf(rows[2]!.replace(ENDS, "")) : rowsOf(rows[2]!.replace(ENDS, ""));
    return [found, position + rows[0].length, "tokens of each row are written “@(3, 5)”, “@((3, 4), (5, 6))” or “@mask(0:3|2:4)”"];
  }
  const match = (matchAt(NAMED, text, position) ?? matchAt(INDEXED, text, position))!; // Every part of INDEXED may be missing.
  const [found, problem] = spanOf(match);
  return [found, position + match[0].length, problem];
}

function spanOf(match: RegExpExecArray): [Tokens | null, string] {
  const [part, colon] = [match[1]!, match[3] !== undefined];
  const [first, last, by] = [match[2], match[4], match[6]].map((bound) => (bound === undefined ? null : integer(bound))) as (number | null)[];
  const written = (inside: string): Tokens => new Tokens(part === "" ? `@${inside}` : inside === ":" ? `@${part}` : `@${part}[${inside}]`);
  if (!colon && first === null && (part === "" || match[0].includes("["))) return [null, "“@” names tokens: “@17”, “@3:9”, “@prompt[-1]”, “@new”"];
  if (colon && by !== null && by! < 1) return [null, "tokens are counted forwards"];
  const fromEnd = "tokens are counted from the end only in the prompt";
  if (!colon && first !== null) return first! < 0 && part !== "prompt" && first !== -1 ? [null, fromEnd] : [written(String(first)), ""];
  if (part !== "prompt" && [first, last].some((bound) => bound !== null && bound! < 0)) return [null, fromEnd];
  const isBackwards = last !== null && (first ?? 0) >= last! && ((first ?? 0) < 0) === (last! < 0);
  if (last === 0 || isBackwards) return [null, "no token is in there"];
  return [written(`${first || ""}:${last ?? ""}${by === null || by === 1 ? "" : `:${by}`}`), ""];
}

function rowsOf(inside: string): Tokens | null {
  const several = [...inside.matchAll(new RegExp(`\\((${NUMBERS})\\)`, "gu"))].map((match) => match[1]!);
  const rest = several.length ? `\\(${NUMBERS}\\)|${SPACE}|,` : `[\\p{Nd},]|${SPACE}`;
  const rows = (several.length ? several : inside.split(",")).map((row) => row.split(",").map((one) => one.replace(ENDS, "")).filter(Boolean));
  if (rows.flat().some((one) => !isNumber(one)) || inside.replace(new RegExp(rest, "gu"), "")) return null;
  if (new Set(rows.map((row) => row.length)).size !== 1 || !rows[0]!.length) return null;
  if (rows.some((row) => row.some((one, at) => at > 0 && integer(one) <= integer(row[at - 1]!)))) return null;
  const texts = rows.map((row) => row.map(integer).join(", "));
  return new Tokens(`@(${(several.length ? texts.map((row) => `(${row})`) : texts).join(", ")})`);
}

function maskOf(inside: string): Tokens | null {
  const rows = inside.split("|").map(columnsOf);
  return rows.includes(null) ? null : new Tokens(`@mask(${rows.map((row) => rangesOf(row!)).join("|")})`);
}

function columnsOf(text: string): number[] | null {
  const found = new Set<number>();
  for (const part of text.split(",")) {
    const one = part.replace(ENDS, "");
    if (!one) continue;
    const [start, ...rest] = one.split(":").map((bound) => bound.replace(ENDS, ""));
    if (rest.length > 1 || !isNumber(start!) || rest.some((bound) => !isNumber(bound) || integer(bound) > MOST_COLUMNS)) return null;
    const end = rest.length ? integer(rest[0]!) : integer(start!) + 1;
    for (let column = integer(start!); column < end; column += 1) found.add(column);
  }
  return [...found].toSorted((one, other) => one - other);
}

/** The text of a row of a mask: "0:3,5". */
function rangesOf(columns: number[]): string {
  const starts = columns.filter((column, at) => column - 1 !== columns[at - 1]);
  const ends = columns.filter((column, at) => column + 1 !== columns[at + 1]);
  return starts.map((start, at) => (start === ends[at] ? String(start) : `${start}:${ends[at]! + 1}`)).join(",");
}

function isNumber(text: string): boolean {
  return /^\p{Nd}+$/u.test(text);
}
