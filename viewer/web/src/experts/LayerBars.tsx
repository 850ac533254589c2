import { percent } from "../format";
import type { Num } from "../types";

/** A bar per layer, its share of the (token, layer) pairs; a table that is read as one. */
export function LayerBars({ values }: { values: Num[] }) {
  const most = Math.max(...values.map((value) => value ?? 0)) || 1;
  return (
    <div class="scroll short" tabIndex={0} role="region" aria-label="Flips by layer">
      <table class="bars">
        <thead class="hidden">
          <tr>
            <th scope="col">layer</th>
            <th scope="col">flips</th>
          </tr>
        </thead>
        <tbody>
          {values.map((value, layer) => (
            <tr key={layer}>
              <th scope="row">{layer}</th>
              <td>
                <span class="bar-fill" style={{ width: `${(70 * (value ?? 0)) / most}%` }} /> {percent(value)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
