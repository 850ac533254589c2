// Numbers and settings as text.

/** Four significant digits; thousands apart; "-" where there is none. */
export function number(value: unknown, digits = 4): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return value == null ? "-" : `${value as string}`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return size >= 10000 ? value.toLocaleString("en-US") : `${value}`;
  if (size < 1e-4 || size >= 1e7) return value.toExponential(2);
  return `${Number(value.toPrecision(digits))}`;
}

export function percent(value: unknown): string {
  return typeof value === "number" && Number.isFinite(value) ? `${number(100 * value, 3)} %` : "-";
}

/** "1 run", "2 runs" */
export function count(amount: number, noun: string): string {
  return `${amount.toLocaleString("en-US")} ${noun}${amount === 1 ? "" : "s"}`;
}

export function setting(value: unknown): string {
  if (value === undefined || value === null) return "not set";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The finite value with this share of the finite values below it; null where there are none. */
export function quantile(values: readonly (number | null)[], share: number): number | null {
  const finite = values
    .filter((value): value is number => value !== null && Number.isFinite(value))
    .sort((a, b) => a - b);
  return finite.length ? finite[Math.min(finite.length - 1, Math.floor(share * finite.length))] : null;
}

/** The text of a token with its white space made visible. */
export const visible = (text: string): string =>
  text.replace(/\n/g, "\u21b5").replace(/ /g, "\u00b7").replace(/\t/g, "\u21e5");
