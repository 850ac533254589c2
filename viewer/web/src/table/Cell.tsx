import { number, percent } from "../format";
import type { Column, Row } from "../types";

/** One value; text of a model is a text node on one line. */
export function Cell({ column, row, link }: { column: Column; row: Row | undefined; link: string | null }) {
  const value = row?.[column.name];
  const text = row === undefined ? "\u00a0" : format(column, value);
  return (
    <div
      class={`td ${column.kind}`}
      role="cell"
      title={column.kind === "text" && value != null ? `${value}` : undefined}
    >
      {link ? (
        <a href={link} tabIndex={-1}>
          {text}
        </a>
      ) : (
        text
      )}
    </div>
  );
}

function format(column: Column, value: unknown): string {
  if (typeof value === "boolean") return value ? "yes" : "";
  if (column.kind === "share") return percent(value);
  if (column.kind === "number") return number(value);
  return value == null ? "" : `${value as string}`.replace(/\s+/g, " ");
}
