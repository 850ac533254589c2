// Filters of columns as people type them, and as the API takes them.

import type { Column, Filter } from "../types";

/**
 * A number's or share's filter: "0.5" or "= 0.5", "> 0.5", ">= 1", "!= 0", "0.2..0.8"; a text's: what it contains.
 * Null where the text is none of these.  Shares are fractions, as they are shown with "%" at the end: "5 %" is 0.05.
 */
export function parseFilter(column: Column, text: string): Filter[] | null {
  const trimmed = text.trim();
  if (!trimmed) return [];
  if (column.kind === "text") return [{ column: column.name, op: "contains", value: trimmed }];
  const range = /^(.+?)\.\.(.+)$/.exec(trimmed);
  if (range) {
    const [low, high] = [toNumber(range[1]), toNumber(range[2])];
    if (low === null || high === null) return null;
    return [
      { column: column.name, op: ">=", value: low },
      { column: column.name, op: "<=", value: high },
    ];
  }
  const found = /^(>=|<=|!=|>|<|=)?\s*(.+)$/.exec(trimmed);
  const value = found && toNumber(found[2]);
  if (!found || value === null) return null;
  return [{ column: column.name, op: (found[1] ?? "=") as Filter["op"], value }];
}

function toNumber(text: string): number | null {
  const trimmed = text.trim();
  const value = Number(trimmed.replace(/\s*%$/, ""));
  if (!trimmed || !Number.isFinite(value)) return null;
  return trimmed.endsWith("%") ? value / 100 : value;
}

export const hint = (column: Column): string =>
  column.kind === "text" ? "contains" : column.kind === "share" ? "> 5 %" : "> 0.5, 1..2";
