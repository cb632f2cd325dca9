/** Match places against a pattern: its path, its member and its subscripts, each separately (see sites.ts and calls.ts). */

import { ANY_NAME, matchName, matchNames } from "./names";
import { alternativesOf, Slice, STAR, type Pattern, type Subscript } from "./sites";
import { Tokens } from "./tokens";

/** Whether the wildcards of a pattern match this module path. */
export function matchesPath(pattern: Pattern, path: string): boolean {
  if (pattern.path !== null) return pattern.path === path;
  if (pattern.member.endsWith("()")) {
    // A method counts as the last name, so that `**.encode()` also matches a method of the model itself.
    const names = [...path.split(".").filter(Boolean), pattern.member];
    return matchNames(names, [...pattern.segments, ANY_NAME]);
  }
  return path !== "" && matchNames(path.split("."), pattern.segments);
}

/** Whether the member of a site matches the member of a pattern, which may have wildcards. */
export function matchesMember(member: string, pattern: string): boolean {
  if (member === pattern || !/[*{]/.test(pattern)) return member === pattern;
  const mark = pattern.startsWith("/") ? "/" : "";
  return member.startsWith(mark) && matchName(member.slice(mark.length), alternativesOf(pattern.slice(mark.length)));
}

/**
 * Whether the subscripts of a pattern match those of a site. A pattern may have more subscripts than the site.
 *
 * The last subscripts of a site may select one tensor of a value; `parts` has all ways to write each of these. A pattern
 * may leave them out: then it matches all tensors of the value. Those it has must match.
 */
export function matchesSubscripts(asked: Subscript[], had: Subscript[], parts: (number | string)[][]): boolean {
  const own = had.length - parts.length;
  if (asked.length < own || !had.slice(0, own).every((one, place) => means(asked[place]!, one))) return false;
  const rest = asked.slice(own);
  return parts.every((ways, place) => place >= rest.length || meansPart(rest[place]!, ways, place === rest.length - 1));
}

function meansPart(asked: Subscript, ways: (number | string)[], last: boolean): boolean {
  if (asked instanceof Slice) return last && isWithin(asked, ways);
  return asked === STAR || ways.some((way) => way === asked);
}

/** Whether a slice contains an item; `ways` has its index from the front and from the end. */
function isWithin({ bounds: [from, to, by] }: Slice, ways: (number | string)[]): boolean {
  const [at, behind] = [ways.find((way) => typeof way === "number" && way >= 0), ways.find((way) => typeof way === "number" && way < 0)];
  if (typeof at !== "number" || typeof behind !== "number") return false;
  const size = at - behind;
  const step = by ?? 1;
  const [lowest, highest] = step > 0 ? [0, size] : [-1, size - 1];
  const clamp = (bound: number): number => Math.max(lowest, Math.min(highest, bound < 0 ? bound + size : bound));
  const start = from === null || from === undefined ? (step > 0 ? lowest : highest) : clamp(from);
  const end = to === null || to === undefined ? (step > 0 ? highest : lowest) : clamp(to);
  const inside = step > 0 ? at >= start && at < end : at <= start && at > end;
  return inside && (at - start) % step === 0;
}

function means(asked: Subscript, had: Subscript): boolean {
  if (asked === STAR) return true;
  if (Array.isArray(asked) || Array.isArray(had)) {
    const both = Array.isArray(asked) && Array.isArray(had) && asked.length === had.length;
    return both && asked.every((one, place) => means(one, had[place]!));
  }
  if (asked instanceof Slice && had instanceof Slice) return asked.bounds.every((bound, place) => bound === had.bounds[place]);
  if (asked instanceof Tokens && had instanceof Tokens) return asked.text === had.text;
  return asked === had;
}
