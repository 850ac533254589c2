// From the values of a quantity to a class per token and a legend.  Bounds are quantiles: one outlier hides nothing.

import { number, quantile } from "../format";
import type { Num } from "../types";
import type { Quantity } from "./quantities";

export interface LegendEntry {
  className: string;
  label: string;
}

export interface Coloring {
  /** "" where the token has no value. */
  classOf: (value: Num | undefined) => string;
  legend: LegendEntry[];
  without: number;
}

const STEPS = 9;

/** One scale for all `values`: responses side by side share it. */
export function coloring(quantity: Quantity, values: Num[]): Coloring {
  const found = values.filter((value): value is number => value !== null);
  const without = values.length - found.length;
  if (quantity.scale === "category") return { ...categories(quantity, found), without };
  if (quantity.scale === "diverging") return { ...diverging(quantity.center ?? 0, found), without };
  if (quantity.scale === "sequential") return { ...sequential(quantity, found), without };
  return { classOf: () => "", legend: [], without: 0 };
}

function categories(quantity: Quantity, values: number[]): Omit<Coloring, "without"> {
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  const place = (value: number) => (quantity.names ? value : 1 + (distinct.indexOf(value) % 8));
  const legend = distinct.map((value) => ({
    className: `category-${place(value)}`,
    label: quantity.names?.[value] ?? `${value}`,
  }));
  return { classOf: (value) => (value == null ? "" : `category-${place(value)}`), legend };
}

function diverging(center: number, values: number[]): Omit<Coloring, "without"> {
  const reach =
    quantile(
      values.map((value) => Math.abs(value - center)),
      0.99,
    ) || 1;
  const half = (STEPS - 1) / 2;
  const step = (value: number) => half + Math.round(half * Math.max(-1, Math.min(1, (value - center) / reach)));
  const legend = Array.from({ length: STEPS }, (_, place) => ({
    className: `diverging-${place}`,
    label: place % half === 0 ? number(center + ((place - half) / half) * reach, 3) : "",
  }));
  return { classOf: (value) => (value == null ? "" : `diverging-${step(value)}`), legend };
}

function sequential(quantity: Quantity, values: number[]): Omit<Coloring, "without"> {
  const isNegative = quantity.key.startsWith("log_");
  const far = quantile(values, isNegative ? 0.01 : 0.99) || (isNegative ? -1 : 1);
  const step = (value: number) => Math.round((STEPS - 1) * Math.max(0, Math.min(1, value / far)));
  const legend = Array.from({ length: STEPS }, (_, place) => ({
    className: `sequential-${place}`,
    label: place % 4 === 0 ? number((place / (STEPS - 1)) * far, 3) : "",
  }));
  return { classOf: (value) => (value == null ? "" : `sequential-${step(value)}`), legend };
}
