/** Which places a pattern means: its path, its member and its subscripts, each by itself (see sites.ts). */

import { ANY_NAME, matchName, matchNames } from "./names";
import { alternativesOf, Slice, STAR, type Pattern, type Subscript } from "./sites";

/** Whether the wildcards of a pattern match this module path. */
export function matchesPath(pattern: Pattern, path: string): boolean {
  if (pattern.path !== null) return pattern.path === path;
  if (pattern.member.endsWith("()")) {
    // A method is the last name: `**.encode()` may be one of the model itself.
    const names = [...path.split(".").filter(Boolean), pattern.member];
    return matchNames(names, [...pattern.segments, ANY_NAME]);
  }
  return path !== "" && matchNames(path.split("."), pattern.segments);
}

/** Whether a member of a site is meant by the member of a pattern, wildcards and all. */
export function matchesMember(member: string, pattern: string): boolean {
  if (member === pattern || !/[*{]/.test(pattern)) return member === pattern;
  const mark = pattern.startsWith("/") ? "/" : "";
  return member.startsWith(mark) && matchName(member.slice(mark.length), alternativesOf(pattern.slice(mark.length)));
}

/** Whether the subscripts asked for are those that a site has, and maybe more. */
export function matchesSubscripts(asked: Subscript[], had: Subscript[]): boolean {
  return asked.length >= had.length && had.every((one, place) => means(asked[place]!, one));
}

function means(asked: Subscript, had: Subscript): boolean {
  if (asked === STAR) return true;
  if (Array.isArray(asked) || Array.isArray(had)) {
    const both = Array.isArray(asked) && Array.isArray(had) && asked.length === had.length;
    return both && asked.every((one, place) => means(one, had[place]!));
  }
  if (asked instanceof Slice && had instanceof Slice) return asked.bounds.every((bound, place) => bound === had.bounds[place]);
  return asked === had;
}
