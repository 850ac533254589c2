import { useState } from "preact/hooks";
import { number } from "../format";
import type { LayerRoute } from "./routes";

/** Experts of both engines per layer; those that only one of them chose are underlined. */
export function RouteTable({ layers }: { layers: LayerRoute[] }) {
  const [isShort, setShort] = useState(false);
  if (!layers.length) return <p class="note">No route is recorded for the forward pass that predicted this token.</p>;
  const shown = isShort ? layers.filter(({ isFlipped }) => isFlipped) : layers;
  return (
    <>
      <label class="check">
        <input type="checkbox" checked={isShort} onChange={(event) => setShort(event.currentTarget.checked)} /> only
        flips
      </label>
      <div class="scroll routes" tabIndex={0} role="region" aria-label="Experts per layer">
        <table>
          <thead>
            <tr>
              <th scope="col">layer</th>
              <th scope="col">server</th>
              <th scope="col">trainer</th>
              <th scope="col" class="number">
                margin
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map(({ layer, server, trainer, margin, isFlipped }) => (
              <tr key={layer} class={isFlipped ? "flipped" : undefined}>
                <th scope="row">
                  {layer}
                  {isFlipped && (
                    <span class="flip-mark" title="flip">
                      {" "}
                      flip
                    </span>
                  )}
                </th>
                <td>
                  <Ids ids={server} others={trainer} />
                </td>
                <td>
                  <Ids ids={trainer} others={server} />
                </td>
                <td class="number">{number(margin, 3)}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {!shown.length && <p class="note">The engines chose the same experts in every layer.</p>}
      </div>
    </>
  );
}

function Ids({ ids, others }: { ids: number[]; others: number[] }) {
  if (!ids.length) return <span class="note">-</span>;
  return (
    <span class="ids">
      {ids.map((id) => (others.length && !others.includes(id) ? <u key={id}>{id}</u> : <span key={id}>{id}</span>))}
    </span>
  );
}
