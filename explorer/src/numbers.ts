/** Numbers as text: short, to compare at a glance, or with all digits. */

const MINUS = "−";
const UNITS = ["", " k", " M", " G", " T"];

/** A number with a few significant digits: 0.2433, −12.4, 1.2e−5. */
export function short(value: number, digits = 4): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return signed(value.toLocaleString("en-US"));
  if (size >= 10 ** Math.max(digits + 1, 6) || size < 1e-4) return signed(trimmed(value.toExponential(digits - 1)));
  return signed(trimmed(value.toPrecision(Math.max(digits, Math.floor(Math.log10(size)) + 1))));
}

/** A number with all its digits. */
export function exact(value: number): string {
  return Number.isFinite(value) ? signed(String(value)) : short(value);
}

/** A count with a unit: 124.4 M. */
export function count(value: number | null): string {
  if (value === null) return "";
  let unit = 0;
  let rest = value;
  while (rest >= 1000 && unit < UNITS.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || rest >= 100 ? 0 : 1;
  return rest.toFixed(digits) + UNITS[unit];
}

/** A share as percent: 12.3 %. */
export function percent(share: number): string {
  if (!Number.isFinite(share)) return short(share);
  const value = 100 * share;
  if (value === 0 || value === 100) return `${value} %`;
  if (value < 0.01) return "< 0.01 %";
  return `${value > 99.9 ? value.toFixed(3) : value < 10 ? value.toFixed(2) : value.toFixed(1)} %`;
}

/** "1 site", "3 sites". */
export function plural(number: number, noun: string): string {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Round numbers within a range, about `most` of them. */
export function ticks(low: number, high: number, most: number): number[] {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

function trimmed(text: string): string {
  const [digits = "", power] = text.split("e");
  const plain = digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
  return power === undefined ? plain : `${plain}e${power.replace("+", "").replace("-", MINUS)}`;
}

function signed(text: string): string {
  return text.startsWith("-") ? MINUS + text.slice(1) : text;
}
