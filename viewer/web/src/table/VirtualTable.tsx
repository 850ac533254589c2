import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Column, Row, TableQuery } from "../types";
import { Cell } from "./Cell";
import { FilterInput } from "./FilterInput";
import { ScrollPosition } from "./scroll";
import type { Rows } from "./useRows";
import { gridOf } from "./widths";

interface Props {
  rows: Rows;
  columns: Column[];
  query: TableQuery;
  filterTexts: Record<string, string>;
  onSort: (column: string) => void;
  onFilter: (column: string, text: string) => void;
  linkOf: (row: Row) => string | null;
}

export const ROW_HEIGHT = 34;

/** A table of any length: only the rows in view exist.  Arrows move between rows, Enter opens one. */
export function VirtualTable({ rows, columns, query, filterTexts, onSort, onFilter, linkOf }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const scroll = useRef(new ScrollPosition(0, 0)).current;
  const [position, setPosition] = useState(0);
  const [view, setView] = useState(600);
  const [focused, setFocused] = useState(-1);
  const total = rows.total ?? 0;
  scroll.resize(total * ROW_HEIGHT, view);
  const first = Math.max(0, Math.floor(position / ROW_HEIGHT) - 4);
  const last = Math.min(total - 1, Math.ceil((position + view) / ROW_HEIGHT) + 4);

  useEffect(() => {
    if (last >= first) rows.show(first, last);
  });
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => {
      const head = box.current?.querySelector<HTMLElement>(".thead")?.offsetHeight ?? 0;
      if (box.current) setView(Math.max(ROW_HEIGHT, box.current.clientHeight - head));
    });
    if (box.current) observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const search = JSON.stringify(query);
  useEffect(() => {
    if (box.current) box.current.scrollTop = scroll.topOf(0);
    setPosition(0);
    setFocused(-1);
  }, [search]);

  const focusRow = (place: number) => {
    const next = Math.max(0, Math.min(total - 1, place));
    const top = next * ROW_HEIGHT;
    if (box.current && (top < scroll.position || top + ROW_HEIGHT > scroll.position + view)) {
      box.current.scrollTop = scroll.topOf(top < scroll.position ? top : top + ROW_HEIGHT - view);
      setPosition(scroll.position);
    }
    setFocused(next);
  };
  useEffect(() => {
    if (focused >= 0)
      box.current?.querySelector<HTMLElement>(`[data-place="${focused}"]`)?.focus({ preventScroll: true });
  }, [focused, first]);

  const moves: Record<string, number> = {
    ArrowDown: 1,
    ArrowUp: -1,
    j: 1,
    k: -1,
    PageDown: 15,
    PageUp: -15,
    Home: -total,
    End: total,
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.target instanceof HTMLInputElement || !(event.key in moves)) return;
    event.preventDefault();
    focusRow(focused < 0 ? first : focused + moves[event.key]);
  };
  const { template, minWidth } = gridOf(columns);
  const offset = scroll.elementHeight && scroll.position ? (box.current?.scrollTop ?? 0) - position : 0;
  return (
    <div
      class="vtable"
      ref={box}
      role="table"
      aria-label="Responses"
      aria-rowcount={total + 1}
      aria-colcount={columns.length}
      tabIndex={focused < 0 ? 0 : -1}
      onKeyDown={onKeyDown}
      onScroll={(event) => setPosition(scroll.scrolled(event.currentTarget.scrollTop))}
    >
      <div class="thead" role="rowgroup" style={{ minWidth: `${minWidth}px` }}>
        <div class="tr" role="row" aria-rowindex={1} style={{ gridTemplateColumns: template }}>
          {columns.map((column) => (
            <HeadCell key={column.name} column={column} query={query} onSort={onSort}>
              {column.filter !== false && (
                <FilterInput
                  column={column}
                  text={filterTexts[column.name] ?? ""}
                  onChange={(text) => onFilter(column.name, text)}
                />
              )}
            </HeadCell>
          ))}
        </div>
      </div>
      <div class="tbody" role="rowgroup" style={{ height: `${scroll.elementHeight}px`, minWidth: `${minWidth}px` }}>
        {Array.from({ length: Math.max(0, last - first + 1) }, (_, offsetRow) => {
          const place = first + offsetRow;
          const row = rows.row(place);
          return (
            <div
              key={place}
              class="tr"
              role="row"
              aria-rowindex={place + 2}
              data-place={place}
              tabIndex={place === focused ? 0 : -1}
              style={{ gridTemplateColumns: template, top: `${place * ROW_HEIGHT + offset}px` }}
              onClick={(event) => {
                if (row && !(event.target instanceof HTMLAnchorElement)) open(linkOf(row));
              }}
              onKeyDown={(event) => {
                if (event.key === "Enter" && row) open(linkOf(row));
              }}
            >
              {columns.map((column, number) => (
                <Cell key={column.name} column={column} row={row} link={number === 0 && row ? linkOf(row) : null} />
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function open(link: string | null): void {
  if (link) location.hash = link;
}

interface HeadProps {
  column: Column;
  query: TableQuery;
  onSort: (column: string) => void;
  children: preact.ComponentChildren;
}

function HeadCell({ column, query, onSort, children }: HeadProps) {
  const isSorted = query.sort === column.name;
  const order = isSorted ? (query.order === "asc" ? "ascending" : "descending") : "none";
  return (
    <div class={`th ${column.kind}`} role="columnheader" aria-sort={order}>
      {column.filter === false ? (
        <span class="th-name">{column.label}</span>
      ) : (
        <button type="button" onClick={() => onSort(column.name)} title={`sort by ${column.label}`}>
          {column.label}
          <span aria-hidden="true">{isSorted ? (query.order === "asc" ? " \u2191" : " \u2193") : ""}</span>
        </button>
      )}
      {children}
    </div>
  );
}
