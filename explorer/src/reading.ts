/** Read text as Python does: its \s and \d differ from JavaScript's outside ASCII. */

/** Python's \s. Its \d is \p{Nd}. */
export const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
export const ENDS = new RegExp(`^${SPACE}+|${SPACE}+$`, "gu");

/** Match a sticky expression at a position of a text. */
export function matchAt(expression: RegExp, text: string, position: number): RegExpExecArray | null {
  expression.lastIndex = position;
  return expression.exec(text);
}

/** Read digits of any script, as Python's int() does: the ten digits of a script are consecutive in Unicode. */
export function integer(text: string): number {
  const digits = [...text].map((digit) => {
    if (digit <= "9") return digit;
    let zero = digit.codePointAt(0)!;
    while (/\p{Nd}/u.test(String.fromCodePoint(zero - 1))) zero -= 1;
    return String((digit.codePointAt(0)! - zero) % 10);
  });
  return Number(digits.join(""));
}
