import { useEffect, useState } from "preact/hooks";
import { count, percent } from "../format";
import { setQuery, rolloutLink } from "../route";
import { Problem } from "../shared/Problem";
import { PromptLink } from "../shared/PromptLink";
import { Warnings } from "../shared/Warnings";
import type { Column, Row, Run, TableQuery } from "../types";
import { ColumnMenu } from "./ColumnMenu";
import { parseFilter } from "./filters";
import { useRows } from "./useRows";
import { VirtualTable } from "./VirtualTable";
import { NARROW, NARROW_SCREEN } from "./widths";

const FILTER = "f."; // prefix of a column's filter in the URL
const GROUP = `${FILTER}group`;

/** Table of responses or of groups.  Sorting, filters, search and columns are in the URL. */
export function RolloutsPage({ run, runs, query }: { run: Run; runs: Run[]; query: URLSearchParams }) {
  const isGroups = query.get("by") === "group";
  const [columns, setColumns] = useState<Column[]>([]);
  const filterTexts = Object.fromEntries(
    [...query].filter(([name]) => name.startsWith(FILTER)).map(([name, text]) => [name.slice(2), text]),
  );
  const group = query.get(GROUP);
  const table: TableQuery = {
    sort: query.get("sort") ?? "step",
    order: query.get("order") === "asc" ? "asc" : "desc",
    q: query.get("q") ?? "",
    filter: [
      ...columns.flatMap((column) => parseFilter(column, filterTexts[column.name] ?? "") ?? []),
      ...(group ? [{ column: "group", op: "=" as const, value: group }] : []),
    ],
  };
  // the kinds of the columns come with the first rows
  const isWaiting = Object.keys(filterTexts).some((name) => name !== "group") && !columns.length;
  const rows = useRows(
    `runs/${run.id}/${isGroups ? "groups" : "rollouts"}`,
    isWaiting ? { ...table, filter: group ? table.filter : [] } : table,
    run.live,
  );
  const names = rows.columns.map(({ name }) => name).join();
  useEffect(() => {
    if (names) setColumns(rows.columns);
  }, [names]);
  const shown = shownColumns(rows.columns, query.get("cols"));
  const sort = (name: string) =>
    setQuery({ sort: name, order: table.sort === name && table.order === "desc" ? "asc" : "desc" });
  const isFiltered = table.q || table.filter.length;
  return (
    <div class="rollouts">
      <div class="controls">
        <h1>Rollouts</h1>
        <div class="tabs" role="group" aria-label="Rows">
          <button type="button" aria-pressed={!isGroups} onClick={() => toggleGroups(false)}>
            Responses
          </button>
          <button type="button" aria-pressed={isGroups} onClick={() => toggleGroups(true)}>
            Groups
          </button>
        </div>
        <SearchBox text={table.q} />
        <ColumnMenu
          columns={rows.columns}
          shown={shown.map(({ name }) => name)}
          onChange={(chosen) => setQuery({ cols: chosen.join(",") })}
        />
        <span class="note" role="status">
          {rows.total === null ? "Loading ..." : count(rows.total, isGroups ? "group" : "response")}
        </span>
        {rows.indexing !== null && (
          <span class="note" role="status">
            indexing: {percent(rows.indexing)}
          </span>
        )}
        {group && <span class="note">of the group {group}</span>}
        {group && <PromptLink runs={runs} promptKey={rows.row(0)?.prompt_key} />}
        {!!isFiltered && (
          <button type="button" onClick={() => clear(query)}>
            Clear filters
          </button>
        )}
      </div>
      <Warnings texts={run.warnings} />
      {rows.error && <Problem text={rows.error} />}
      {!!shown.length && (
        <VirtualTable
          rows={rows}
          columns={shown}
          query={table}
          filterTexts={filterTexts}
          onSort={sort}
          onFilter={(name, text) => setQuery({ [FILTER + name]: text })}
          linkOf={(row) => linkOf(run, row, isGroups)}
        />
      )}
      {rows.total === 0 && <p class="note">{isFiltered ? "No row has all of this." : "No rollout is recorded yet."}</p>}
    </div>
  );
}

function toggleGroups(isGroups: boolean): void {
  const query = new URLSearchParams(location.hash.split("?")[1]);
  clear(query);
  setQuery({ by: isGroups ? "group" : null, sort: null, order: null, cols: null });
}

function clear(query: URLSearchParams): void {
  const filters = [...query.keys()].filter((name) => name.startsWith(FILTER));
  setQuery(Object.fromEntries(["q", ...filters].map((name) => [name, null])));
}

function shownColumns(columns: Column[], chosen: string | null): Column[] {
  const narrow = window.innerWidth < NARROW_SCREEN ? columns.filter(({ name }) => NARROW.includes(name)) : columns;
  const picked = chosen ? columns.filter(({ name }) => chosen.split(",").includes(name)) : narrow;
  return picked.length ? picked : columns;
}

/** A response opens; a group lists its responses. */
function linkOf(run: Run, row: Row, isGroup: boolean): string | null {
  if (!row.key) return null;
  return isGroup
    ? `#/run/${run.id}/rollouts?${new URLSearchParams({ [GROUP]: row.key })}`
    : rolloutLink(run.id, row.key);
}

/** Full-text search; asks a moment after the last key. */
function SearchBox({ text }: { text: string }) {
  const [typed, setTyped] = useState(text);
  useEffect(() => setTyped(text), [text]);
  useEffect(() => {
    if (typed === text) return undefined;
    const timer = window.setTimeout(() => setQuery({ q: typed }), 120);
    return () => window.clearTimeout(timer);
  }, [typed]);
  return (
    <label class="grow">
      <span class="hidden">Search prompts and responses</span>
      <input
        type="search"
        value={typed}
        placeholder="search prompts and responses"
        onInput={(event) => setTyped(event.currentTarget.value)}
      />
    </label>
  );
}
