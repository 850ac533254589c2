// The rows of a large table, read in pages as they come into view.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { getRows } from "../client";
import type { Column, Row, TableQuery } from "../types";
import { poll } from "../useData";

export const PAGE_ROWS = 100;
const MAX_PAGES = 60; // kept in memory

export interface Rows {
  total: number | null;
  indexing: number | null;
  columns: Column[];
  error: string | null;
  row: (place: number) => Row | undefined;
  /** Reads the pages of these rows, unless they are known. */
  show: (first: number, last: number) => void;
}

export function useRows(path: string, query: TableQuery, isLive: boolean): Rows {
  const [, redraw] = useState(0);
  const [columns, setColumns] = useState<Column[]>([]);
  const name = `${path} ${JSON.stringify(query)}`;
  const reader = useMemo(() => new RowReader(path, query, setColumns, () => redraw((count) => count + 1)), [name]);
  const shown = useRef<RowReader | null>(null);
  useEffect(() => {
    void reader.load(0).then(() => {
      shown.current = reader;
    });
    const stop = isLive ? poll(() => reader.refresh()) : () => undefined;
    return () => {
      stop();
      reader.abort.abort();
    };
  }, [reader, isLive]);
  const isReading = reader.total === null && !reader.error;
  const source = isReading && shown.current ? shown.current : reader; // old rows until new ones are here
  return {
    total: source.total,
    indexing: source.indexing,
    columns,
    error: reader.error,
    row: (place) => source.row(place),
    show: (first, last) => source === reader && reader.show(first, last),
  };
}

class RowReader {
  total: number | null = null;
  indexing: number | null = null;
  error: string | null = null;
  abort = new AbortController();
  private pages = new Map<number, Row[]>();
  private loading = new Set<number>();
  private visible: [number, number] = [0, 0];
  private timer = 0;

  constructor(
    private path: string,
    private query: TableQuery,
    private onColumns: (columns: Column[]) => void,
    private onChange: () => void,
  ) {}

  row(place: number): Row | undefined {
    return this.pages.get(Math.floor(place / PAGE_ROWS))?.[place % PAGE_ROWS];
  }

  show(first: number, last: number): void {
    this.visible = [Math.floor(first / PAGE_ROWS), Math.floor(last / PAGE_ROWS)];
    clearTimeout(this.timer);
    const missing = this.visiblePages().filter((page) => !this.pages.has(page) && !this.loading.has(page));
    // pages that are only passed while the bar is dragged are not read
    if (missing.length) this.timer = window.setTimeout(() => missing.forEach((page) => void this.load(page)), 40);
  }

  async refresh(): Promise<void> {
    await Promise.all(this.visiblePages().map((page) => this.load(page)));
  }

  async load(page: number): Promise<void> {
    this.loading.add(page);
    try {
      const found = await getRows(this.path, this.query, page * PAGE_ROWS, PAGE_ROWS, this.abort.signal);
      this.total = found.total;
      this.indexing = found.indexing ?? null;
      this.error = null;
      this.pages.delete(page); // then the newest is last
      this.pages.set(page, found.rows);
      for (const old of this.pages.keys()) {
        if (this.pages.size <= MAX_PAGES) break;
        this.pages.delete(old);
      }
      this.onColumns(found.columns);
    } catch (error) {
      if (this.abort.signal.aborted) return;
      this.error = (error as Error).message;
    } finally {
      this.loading.delete(page);
    }
    this.onChange();
  }

  private visiblePages(): number[] {
    const [first, last] = this.visible;
    return Array.from({ length: last - first + 1 }, (_, place) => first + place);
  }
}
