/**
 * The site language: what a user writes to name places in a model.
 *
 *     path [#calls] [.method() or /function] [#calls] [:port] [subscripts]        h.3#2/softmax#1:input[:, -1]
 *
 * This is `src/hookline/_sites/language.py` in TypeScript, function by function: a text matches the same sites on the page as in
 * Python, and a test compares the two. Change them together. What may follow a `#` is in calls.ts, what may follow an `@` in
 * tokens.ts.
 */

import { readCalls, type Wanted } from "./calls";
import type { Alternatives, Segments } from "./names";
import { ENDS, integer, matchAt, SPACE } from "./reading";
import { readTokens, Tokens } from "./tokens";

const PORTS = ["output", "input", "inputs", "grad_output", "grad_input", "grad_inputs", "param"];
const LONGEST_TEXT = 4096;
const LARGEST_INTEGER = 2 ** 31;
const MOST_ALTERNATIVES = 1024;

const TOKEN = new RegExp(
  `${SPACE}*(?:(-?\\p{Nd}+)|(\\.\\.\\.)|(None)|(\\*)|(:)|(,)|(\\])|("(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*'))`,
  "suy",
);
const PLAIN = /[^.:[#/(*{\\]+/uy;
const TOKENS = new RegExp(`${SPACE}*(?=@)`, "uy");
const PORT = /[\p{L}\p{N}_]*/uy;
const SPECIAL = /[\\*{}[\]:#/()]/u;
const MEMBER = /^[\p{L}\p{N}_*{},]+$/u;
const AROUND_COMMAS = new RegExp(`(?<=[{,])${SPACE}+|${SPACE}+(?=[},])`, "gu");

/** An error in a text, with its position. */
export class SiteError extends Error {}

/** Every index of a dimension, as `[*]` writes it. */
export const STAR = Symbol("*");
const ELLIPSIS = Symbol("...");
const COLON = Symbol(":");

export class Slice {
  constructor(readonly bounds: readonly (number | null)[]) {}
}

type Item = number | string | null | symbol | Slice | Tokens;
export type Subscript = Item | Item[];

const ROOT: Segments = [[[""]]];

/** A parsed text: the modules it matches (`path`, or else `segments` with wildcards), and the place at each. */
export interface Pattern {
  text: string;
  path: string | null;
  segments: Segments;
  port: string;
  subscripts: Subscript[];
  call: Wanted;
  member: string;
  within: Wanted;
}

/** Read one text of the site language. */
export function parse(text: string): Pattern {
  if ([...text].length > LONGEST_TEXT) throw new SiteError(`more than ${LONGEST_TEXT} characters`);
  let [segments, position] = parsePath(text);
  let call: Wanted;
  [call, position] = parseCalls(text, position);
  let member = "";
  let within: Wanted = null;
  if (["/", ".", "("].includes(text.charAt(position))) {
    [segments, member, position] = parseMember(text, position, segments);
    within = call;
    [call, position] = parseCalls(text, position);
  }
  let port: string;
  [port, position] = parsePort(text, position);
  let subscripts: Subscript[];
  [subscripts, position] = parseSubscripts(text, position);
  if (call === null) [call, position] = parseCalls(text, position);
  if (position < text.length) refuse(position, `unexpected “${text.charAt(position)}”`);
  if (port === "param" && (member || call !== null)) refuse(text.indexOf(":param"), "“:param” has no calls and no members");
  const tokens = subscripts.flat().filter((item) => item instanceof Tokens).length;
  if (tokens > 1 || (tokens && port === "param")) refuse(0, tokens > 1 ? "a site names its tokens once" : "a parameter has no tokens");
  const literal = segments.every((names) => names !== null && names.length === 1 && names[0]!.length === 1);
  const path = literal ? segments.map((names) => names![0]![0]!).join(".") : null;
  return { text, path, segments, port, subscripts, call, member, within };
}

/** Return the subscripts in the text of an index. */
export function subscriptsOf(index: string): Subscript[] {
  return parseSubscripts(index, 0)[0];
}

/** Return the alternatives in the name of a method or a function. */
export function alternativesOf(name: string): Alternatives {
  const [names, end] = parseName(name, 0);
  if (end < name.length || names === null) throw new SiteError(`“${name}” is no name, nor a pattern of names`);
  return names;
}

function refuse(position: number, problem: string): never {
  throw new SiteError(`${problem} at ${position + 1}`);
}

/** Read names up to the first special character; return the alternatives of each name, and where the path ends. */
function parsePath(text: string): [Segments, number] {
  const segments: Segments = [];
  let position = -1;
  for (;;) {
    let names: Alternatives | null;
    [names, position] = parseName(text, position + 1);
    segments.push(names);
    if (text.charAt(position) !== ".") return [segments, position];
  }
}

/** Read one name of a path; return its alternatives, null for `**`, and where it ends. */
function parseName(text: string, start: number): [Alternatives | null, number] {
  let alternatives: Alternatives = [[""]]; // Each alternative is the pieces of literal text between its `*`s.
  let stars = 0;
  let position = start;
  for (;;) {
    const character = text.charAt(position);
    if (["", ".", ":", "[", "#", "/", "("].includes(character)) {
      const deep = stars === 2 && alternatives.length === 1 && alternatives[0]!.length === 3 && !alternatives[0]!.join("");
      return [deep ? null : finish(alternatives, stars), position];
    }
    if (character === "*") {
      stars += 1;
      alternatives = alternatives.map((pieces) => [...pieces, ""]);
    } else if (character === "{") {
      [alternatives, position] = parseBraces(text, position, alternatives);
    } else if (character === "\\" && position + 1 < text.length) {
      const escaped = String.fromCodePoint(text.codePointAt(position + 1)!);
      append(alternatives, escaped);
      position += escaped.length;
    } else {
      const run = matchAt(PLAIN, text, position)?.[0] ?? character;
      append(alternatives, run);
      position += run.length - 1;
    }
    position += 1;
  }
}

/** Read `/function`, `.method()`, or the `()` of a method whose name was read as the last name of the path. */
function parseMember(text: string, at: number, segments: Segments): [Segments, string, number] {
  const mark = text.charAt(at);
  let position = at;
  let start = at + 1;
  if (mark === "(") {
    start = text.slice(0, at).lastIndexOf(".") + 1;
    segments = segments.length > 1 ? segments.slice(0, -1) : ROOT;
  } else {
    position = parseName(text, start)[1];
  }
  const name = text.slice(start, position).replace(AROUND_COMMAS, "");
  if (!MEMBER.test(name) || name.includes("**")) refuse(start, "a function or method has a plain name");
  if (mark === "/") return [segments, `/${name}`, position];
  if (text.slice(position, position + 2) !== "()") refuse(position, "a method is written with “()”");
  return [segments, `${name}()`, position + 2];
}

function finish(alternatives: Alternatives, stars: number): Alternatives {
  if (stars > 1 && alternatives.some((pieces) => pieces.slice(1, -1).includes(""))) {
    throw new SiteError("“**” stands alone between dots");
  }
  return alternatives;
}

function parseBraces(text: string, position: number, alternatives: Alternatives): [Alternatives, number] {
  const end = text.indexOf("}", position);
  if (end < 0) refuse(position, "“{” is not closed");
  const choices = text.slice(position + 1, end).split(",").map((choice) => choice.replace(ENDS, ""));
  const longest = largest(choices.map(lengthOf)) + largest(alternatives.map((pieces) => lengthOf(pieces.join(""))));
  if (choices.length * alternatives.length * (Math.floor(longest / 64) + 1) > MOST_ALTERNATIVES) {
    refuse(position, `more than ${MOST_ALTERNATIVES} alternatives`);
  }
  if (choices.some((choice) => !choice || SPECIAL.test(choice) || choice.includes("."))) {
    refuse(position, "“{...}” takes plain names between commas");
  }
  return [alternatives.flatMap((pieces) => choices.map((choice) => [...pieces.slice(0, -1), pieces.at(-1)! + choice])), end];
}

function append(alternatives: Alternatives, text: string): void {
  for (const pieces of alternatives) pieces[pieces.length - 1] += text;
}

function parseCalls(text: string, position: number): [Wanted, number] {
  if (text.charAt(position) !== "#") return [null, position];
  const [calls, end] = readCalls(text, position + 1);
  if (calls === null || ["-", ","].includes(text.charAt(end))) refuse(position, "“#” takes calls: “#0”, “#1:”, “#:3”, “#{0,2}”, “#*” or “#-1”");
  return [calls, end];
}

function parsePort(text: string, position: number): [string, number] {
  if (text.charAt(position) !== ":") return ["output", position];
  const name = matchAt(PORT, text, position + 1)?.[0] ?? "";
  if (!PORTS.includes(name)) refuse(position, `“${name}” is not a port: ${PORTS.join(", ")}`);
  return [name, position + 1 + name.length];
}

function parseSubscripts(text: string, start: number): [Subscript[], number] {
  const found: Subscript[] = [];
  let position = start;
  while (text.charAt(position) === "[") {
    let subscript: Subscript;
    [subscript, position] = parseSubscript(text, position);
    found.push(subscript);
  }
  return [found, position];
}

/** Read one `[...]`; return a single item as it is, several as a list. */
function parseSubscript(text: string, start: number): [Subscript, number] {
  const items: Item[] = [];
  let parts: Item[] = []; // The item being read, with the colons of a slice in it.
  let position = start + 1;
  for (;;) {
    const mark = matchAt(TOKENS, text, position);
    if (mark) {
      const [tokens, end, problem] = readTokens(text, position + mark[0].length);
      parts.push(tokens ?? refuse(position, problem));
      position = end;
      continue;
    }
    const match = matchAt(TOKEN, text, position) ?? refuse(position, "not a subscript");
    position += match[0].length;
    const kind = match.findIndex((group, place) => place > 0 && group !== undefined);
    if (kind === 6 || kind === 7) {
      items.push(finishItem(start, parts));
      parts = [];
      if (kind === 7) return [finishSubscript(start, items), position];
    } else {
      parts.push(readToken(position, match[kind]!, kind));
    }
  }
}

function readToken(position: number, token: string, kind: number): Item {
  if (kind === 1) {
    const value = integer(token);
    if (Math.abs(value) >= LARGEST_INTEGER) refuse(position, "an index of 2**31 or more");
    return value;
  }
  if (kind === 8) return token.slice(1, -1).replace(/\\(.)/gsu, "$1");
  return { 2: ELLIPSIS, 3: null, 4: STAR, 5: COLON }[kind] ?? null;
}

function finishItem(start: number, parts: Item[]): Item {
  if (!parts.includes(COLON)) {
    if (parts.length !== 1) refuse(start, parts.length ? "a comma is missing" : "an empty subscript");
    return parts[0]!;
  }
  const bounds: (number | null)[] = [null];
  for (const part of parts) {
    if (part === COLON) bounds.push(null);
    else if (typeof part === "number" && bounds.at(-1) === null) bounds[bounds.length - 1] = part;
    else refuse(start, "not a slice");
  }
  if (bounds.length > 3 || bounds[2] === 0) refuse(start, "not a slice");
  const [from, to] = bounds as [number | null, number | null];
  return new Slice([from, to, bounds[2] ?? null]);
}

function finishSubscript(start: number, items: Item[]): Subscript {
  if (items.length > 1 && items.some((item) => typeof item === "string")) refuse(start, "a key stands alone in its brackets");
  if (items.filter((item) => item === ELLIPSIS).length > 1) refuse(start, "more than one “...”");
  return items.length === 1 ? items[0]! : items;
}

function lengthOf(text: string): number {
  return [...text].length;
}

function largest(numbers: number[]): number {
  return Math.max(...numbers);
}
