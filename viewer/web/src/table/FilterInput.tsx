import { useEffect, useState } from "preact/hooks";
import type { Column } from "../types";
import { hint, parseFilter } from "./filters";

/** The filter of one column; it takes effect while typing, once it can be read. */
export function FilterInput({
  column,
  text,
  onChange,
}: {
  column: Column;
  text: string;
  onChange: (text: string) => void;
}) {
  const [typed, setTyped] = useState(text);
  useEffect(() => setTyped(text), [text]);
  const isWrong = parseFilter(column, typed) === null;
  return (
    <input
      class="filter"
      type="text"
      value={typed}
      placeholder={hint(column)}
      aria-label={`Filter ${column.label}`}
      aria-invalid={isWrong}
      title={isWrong ? "a number, > 0.5, <= 1, != 0 or a range 0.2..0.8" : undefined}
      onInput={(event) => {
        const next = event.currentTarget.value;
        setTyped(next);
        if (parseFilter(column, next) !== null) onChange(next);
      }}
    />
  );
}
