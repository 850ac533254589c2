import { useMemo } from "preact/hooks";
import { number } from "../format";
import { Notes } from "../shared/Notes";
import type { Num, Rollout } from "../types";
import type { Coloring } from "./coloring";
import type { RouteView } from "./routes";
import { Strip } from "./Strip";
import { TokenText } from "./TokenText";

interface Props {
  rollout: Rollout;
  routes: RouteView | null;
  values: Num[];
  colors: Coloring;
  hasHead: boolean;
  parting: number | null;
  cursor: number | null;
  isFollowed: boolean;
  onHover: (place: number) => void;
  onPick: (place: number) => void;
}

/** One response of the page: its text, and the strip of its routes. */
export function Response({
  rollout,
  routes,
  values,
  colors,
  hasHead,
  parting,
  cursor,
  isFollowed,
  onHover,
  onPick,
}: Props) {
  const { tokens, meta } = rollout;
  const classes = useMemo(
    () => tokens.map((token, place) => (token.span === "model" ? colors.classOf(values[place]) || "without" : "off")),
    [tokens, values, colors],
  );
  return (
    <article class="response">
      {hasHead && (
        <h2>
          {`${meta.id ?? ""}`}{" "}
          <span class="note">
            reward {number(meta.reward)}
            {parting !== null && `, parts at token ${parting}`}
          </span>
        </h2>
      )}
      <Notes texts={rollout.notes} />
      {!tokens.length && <PlainText meta={meta} />}
      {!!tokens.length && (
        <TokenText
          label={`Tokens of ${meta.id as string}; arrow keys move`}
          tokens={tokens}
          classes={classes}
          cursor={cursor}
          isFollowed={isFollowed}
          parting={parting}
          onHover={onHover}
          onPick={onPick}
        />
      )}
      {routes && <Strip routes={routes} length={tokens.length} cursor={cursor} onHover={onHover} onPick={onPick} />}
      {!!tokens.length && !routes && <p class="note">No experts are recorded for this response.</p>}
    </article>
  );
}

/** Without tensors there are no tokens: the recorded texts. */
function PlainText({ meta }: { meta: Record<string, unknown> }) {
  return (
    <div class="tokens">
      <section class="span prompt">
        <h3>prompt</h3>
        <div class="text">{`${meta.prompt ?? ""}`}</div>
      </section>
      <section class="span model">
        <h3>response</h3>
        <div class="text">{`${meta.response ?? ""}`}</div>
      </section>
    </div>
  );
}
