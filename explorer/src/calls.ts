/** Several calls, as a site names them: `#1:`, `#:3`, `#{0,2}`, `#*`, `#-1`. This is `_sites/calls.py` in TypeScript. */

import { ENDS, integer, matchAt, SPACE } from "./reading";

const RANGE = /(\p{Nd}{0,10}):(?![A-Za-z_])(\p{Nd}{0,10})(?::(?![A-Za-z_])(\p{Nd}{1,10}))?/uy;
const SET = new RegExp(`\\{${SPACE}*(\\p{Nd}{1,10}(?:${SPACE}*,${SPACE}*\\p{Nd}{1,10})*)${SPACE}*\\}`, "uy");
const ONE = /\p{Nd}{1,10}/uy;
const LATEST = /-1(?![\p{Nd}:])/uy;

/** Several calls: how they are written, without the `#`, and which calls they are. */
export class Calls {
  constructor(
    readonly text: string,
    readonly has: (call: number) => boolean,
  ) {}
}

/** Which calls a pattern means: one, several, or all of them as one. */
export type Wanted = number | Calls | null;

/** Read the calls right after a `#`. Return them, or null if there are no such calls, and where they end. */
export function readCalls(text: string, position: number): [Wanted, number] {
  const every = (): boolean => true;
  if (text.charAt(position) === "*") return [new Calls("*", every), position + 1];
  if (matchAt(LATEST, text, position)) return [new Calls("-1", every), position + 2];
  const several = matchAt(SET, text, position);
  if (several) {
    const numbers = [...new Set(several[1]!.split(",").map((one) => integer(one.replace(ENDS, ""))))].toSorted((one, other) => one - other);
    const calls = numbers.length === 1 ? numbers[0]! : new Calls(`{${numbers.join(",")}}`, (call) => numbers.includes(call));
    return [calls, position + several[0].length];
  }
  const bounds = matchAt(RANGE, text, position);
  if (bounds) return [rangeOf(bounds), position + bounds[0].length];
  const one = matchAt(ONE, text, position);
  return one ? [integer(one[0]), position + one[0].length] : [null, position];
}

function rangeOf(bounds: RegExpExecArray): Calls | null {
  const [start, stop, step] = bounds.slice(1, 4).map((bound) => (bound ? integer(bound) : null)) as (number | null)[];
  const from = start ?? 0;
  const by = step ?? 1;
  const end = stop ?? Infinity;
  if (by === 0 || end <= from) return null;
  const text = `${from || ""}:${stop ?? ""}${by === 1 ? "" : `:${by}`}`;
  return new Calls(text, (call) => call >= from && call < end && (call - from) % by === 0);
}

/** Whether a site's calls, a number or their text, are among those that a pattern means. */
export function meansCalls(asked: Wanted, had: number | string | null): boolean {
  if (asked === null || asked === had) return true;
  return asked instanceof Calls && (typeof had === "number" ? asked.has(had) : asked.text === had);
}
