import type { Column } from "../types";

/** Which columns are shown. */
export function ColumnMenu({
  columns,
  shown,
  onChange,
}: {
  columns: Column[];
  shown: string[];
  onChange: (names: string[]) => void;
}) {
  const toggle = (name: string) => {
    const next = columns.map((column) => column.name).filter((other) => (other === name) !== shown.includes(other));
    if (next.length) onChange(next);
  };
  return (
    <details class="menu">
      <summary>Columns</summary>
      <div class="menu-body">
        {columns.map(({ name, label }) => (
          <label key={name} class="check">
            <input type="checkbox" checked={shown.includes(name)} onChange={() => toggle(name)} /> {label}
          </label>
        ))}
      </div>
    </details>
  );
}
