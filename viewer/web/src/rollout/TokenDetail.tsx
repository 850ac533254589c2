import { number, visible } from "../format";
import type { Rollout } from "../types";
import { QUANTITIES } from "./quantities";
import { RouteTable } from "./RouteTable";
import type { RouteView } from "./routes";

interface Props {
  rollout: Rollout;
  routes: RouteView | null;
  place: number | null;
  onClose: () => void;
}

/** All numbers of one token, and the experts of both engines per layer. */
export function TokenDetail({ rollout, routes, place, onClose }: Props) {
  if (place === null || !rollout.tokens[place]) {
    return (
      <aside class="detail empty">
        <p class="note">
          Point at a token, or press an arrow key. <kbd>?</kbd> shows all keys.
        </p>
      </aside>
    );
  }
  const { text, id, span, bytes } = rollout.tokens[place];
  const shown = QUANTITIES.filter(({ key }) => key !== "none" && key in rollout.values);
  const value = (key: string, names?: string[]) => {
    const found = rollout.values[key][place] ?? null;
    return names && found !== null ? (names[found] ?? `${found}`) : number(found, 5);
  };
  return (
    <aside class="detail" aria-label="Token">
      <button type="button" class="close" aria-label="Close" onClick={onClose}>
        {"\u00d7"}
      </button>
      <h2 aria-live="polite">
        <code class="token-name">{visible(text)}</code>{" "}
        <span class="note">
          token {place} of {rollout.tokens.length}
        </span>
      </h2>
      <p class="note">
        id {id}, {span}
        {bytes ? `, bytes ${bytes}` : ""}
        {routes?.numFlips(place) ? `, flipped in ${routes.numFlips(place)} of ${routes.layers} layers` : ""}
      </p>
      {span === "model" && (
        <dl class="numbers">
          {shown.map(({ key, label, names }) => (
            <div key={key}>
              <dt>{label}</dt>
              <dd>{value(key, names)}</dd>
            </div>
          ))}
        </dl>
      )}
      {routes && <RouteTable layers={routes.layersOf(place)} />}
    </aside>
  );
}
