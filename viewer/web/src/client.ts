// Two back ends with one face: the server's API, and an export on disk (window.EXPORT, no network).

import { exportedPage } from "./exported";
import type { TablePage, TableQuery } from "./types";

interface Exported {
  schema: number;
  responses: Record<string, unknown>;
}

declare global {
  interface Window {
    EXPORT?: Exported;
  }
}

/** False only where an export lacks this path. */
export const isThere = (path: string): boolean => window.EXPORT?.responses[path] !== undefined || !window.EXPORT;

export const isExport = (): boolean => window.EXPORT !== undefined;

/** Loads data.js where the pages were opened from disk; it sets window.EXPORT. */
export function loadExport(): Promise<void> {
  if (isExport() || location.protocol !== "file:") return Promise.resolve();
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "data.js";
    script.onload = () => resolve();
    script.onerror = () =>
      reject(new Error("data.js is not beside index.html: copy the complete folder of the export"));
    document.head.append(script);
  });
}

/** JSON of /api/PATH.  Error with the server's own message; "not in this export" where an export lacks it. */
export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  if (window.EXPORT) {
    const found = window.EXPORT.responses[path.split("?")[0]];
    if (found === undefined) throw new Error("not in this export");
    return found as T;
  }
  const answer = await fetch(`/api/${path}`, { signal, credentials: "same-origin" });
  if (answer.ok) return (await answer.json()) as T;
  if (answer.status === 401) {
    throw new Error("access refused: open the address that `megatron-rl view` printed, with its token");
  }
  const text = await answer.text();
  throw new Error(detail(text) ?? `${answer.status} ${answer.statusText}`);
}

function detail(text: string): string | null {
  try {
    const { detail } = JSON.parse(text) as { detail?: unknown };
    return typeof detail === "string" ? detail : null;
  } catch {
    return null; // not JSON: a proxy's page, say; its status is shown
  }
}

/** `limit` rows from `offset` of the sorted and filtered table at `path` (runs/0/rollouts or runs/0/groups). */
export async function getRows(
  path: string,
  query: TableQuery,
  offset: number,
  limit: number,
  signal?: AbortSignal,
): Promise<TablePage> {
  if (isExport()) return exportedPage(await get<TablePage>(path), query, offset, limit);
  const search = new URLSearchParams({ offset: `${offset}`, limit: `${limit}` });
  if (query.sort) {
    search.set("sort", query.sort);
    search.set("order", query.order);
  }
  if (query.q) search.set("q", query.q);
  if (query.filter.length) search.set("filter", JSON.stringify(query.filter));
  return get<TablePage>(`${path}?${search}`, signal);
}
