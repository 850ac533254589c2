// Sorting, filtering and searching the rows of an export, where no server does it.

import type { Filter, Row, TablePage, TableQuery, Value } from "./types";

const OPERATORS: Record<Filter["op"], (a: Value, b: string | number) => boolean> = {
  ">=": (a, b) => Number(a) >= Number(b),
  "<=": (a, b) => Number(a) <= Number(b),
  ">": (a, b) => Number(a) > Number(b),
  "<": (a, b) => Number(a) < Number(b),
  "=": (a, b) => (typeof b === "number" ? Number(a) === b : `${a}` === b),
  "!=": (a, b) => (typeof b === "number" ? Number(a) !== b : `${a}` !== b),
  contains: (a, b) => `${a}`.toLowerCase().includes(`${b}`.toLowerCase()),
};

export function exportedPage(table: TablePage, query: TableQuery, offset: number, limit: number): TablePage {
  const words = query.q.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = table.rows.filter((row) => isKept(row, query.filter) && hasWords(row, words));
  if (query.sort) {
    const sign = query.order === "desc" ? -1 : 1;
    rows.sort((a, b) => compare(a[query.sort], b[query.sort], sign));
  }
  return { ...table, total: rows.length, rows: rows.slice(offset, offset + limit) };
}

function isKept(row: Row, filters: Filter[]): boolean {
  return filters.every(({ column, op, value }) => row[column] != null && OPERATORS[op](row[column] as Value, value));
}

function hasWords(row: Row, words: string[]): boolean {
  const text = `${row.prompt ?? ""} ${row.response ?? ""}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

/** Rows without a value come last in both orders. */
function compare(a: Value | undefined, b: Value | undefined, sign: number): number {
  if (a == null || b == null) return Number(a == null) - Number(b == null);
  const order = typeof a === "string" || typeof b === "string" ? `${a}`.localeCompare(`${b}`) : Number(a) - Number(b);
  return sign * order;
}
