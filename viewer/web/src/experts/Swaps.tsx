import type { Swap } from "../types";

/** The server chose one expert, the trainer another: the most frequent pairs. */
export function Swaps({ swaps }: { swaps: Swap[] }) {
  if (!swaps.length) return <p class="note">No flip is recorded for these steps.</p>;
  const most = Math.max(...swaps.map(({ count }) => count));
  return (
    <div class="scroll short swaps" tabIndex={0} role="region" aria-labelledby="swaps">
      <table>
        <thead>
          <tr>
            <th scope="col" class="number">
              layer
            </th>
            <th scope="col" class="number">
              server chose
            </th>
            <th scope="col" class="number">
              trainer chose
            </th>
            <th scope="col" class="grow">
              times
            </th>
          </tr>
        </thead>
        <tbody>
          {swaps.map(({ layer, from, to, count }) => (
            <tr key={`${layer} ${from} ${to}`}>
              <td class="number">{layer}</td>
              <td class="number">{from}</td>
              <td class="number">{to}</td>
              <td>
                <span class="bar-fill" style={{ width: `${(70 * count) / most}%` }} /> {count}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
