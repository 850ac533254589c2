// Exponential smoothing of a curve, corrected for its start; places without a value stay empty.

import type { Num } from "../types";

/** y_t = sum_i a^(t - i) x_i / sum_i a^(t - i) over the values so far, a = `share` in [0, 1). */
export function smooth(values: Num[], share: number): Num[] {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = share * sum + value;
    weight = share * weight + 1;
    return sum / weight;
  });
}
