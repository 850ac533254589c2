// Widths of columns in pixels, and which columns a narrow screen shows first.

import type { Column } from "../types";

const PIXELS: Record<string, number> = {
  step: 76,
  id: 96,
  prompt: 200,
  response: 280,
  has_tensors: 80,
  turns: 72,
  versions: 84,
  kl: 106,
  max_log_ratio: 118,
};
const STRETCHED = new Set(["prompt", "response"]); // they share what is left
const [DEFAULT, SPACE] = [90, 12];

/** The columns of each row's grid; the same for all rows, whatever they hold. */
export function gridOf(columns: Column[]): { template: string; minWidth: number } {
  const most = window.innerWidth < NARROW_SCREEN ? NARROW_TEXT : Infinity;
  const pixels = columns.map(({ name }) => Math.min(most, PIXELS[name] ?? DEFAULT));
  const hasStretched = columns.some(({ name }) => STRETCHED.has(name));
  const template = columns.map(({ name }, place) =>
    STRETCHED.has(name) || !hasStretched ? `minmax(${pixels[place]}px, ${pixels[place]}fr)` : `${pixels[place]}px`,
  );
  return { template: template.join(" "), minWidth: pixels.reduce((sum, width) => sum + width + SPACE, SPACE) };
}

/** Columns of a phone's first view; the others are chosen in the column list. */
export const NARROW = ["step", "reward", "response", "reward_mean", "count"];
export const NARROW_SCREEN = 700;
const NARROW_TEXT = 116; // pixels of its columns, at most
