import { number } from "../format";

/** The numbers of a chart as a table, for those who do not see it; read only when opened. */
export function NumberTable({
  title,
  head,
  rows,
}: {
  title: string;
  head: string[];
  rows: () => (number | string | null)[][];
}) {
  return (
    <details class="number-table">
      <summary>{title}</summary>
      <Rows head={head} rows={rows} />
    </details>
  );
}

function Rows({ head, rows }: { head: string[]; rows: () => (number | string | null)[][] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Numbers">
      <table>
        <thead>
          <tr>
            {head.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows()
            .slice(0, 1000)
            .map((row, place) => (
              <tr key={place}>
                {row.map((value, column) => (
                  <td key={column} class="number">
                    {number(value)}
                  </td>
                ))}
              </tr>
            ))}
        </tbody>
      </table>
    </div>
  );
}
