import { useEffect, useMemo, useState } from "preact/hooks";
import { isThere } from "../client";
import { rolloutLink, setQuery } from "../route";
import { Problem } from "../shared/Problem";
import { PromptLink } from "../shared/PromptLink";
import { Warnings } from "../shared/Warnings";
import type { Num, Rollout, Run } from "../types";
import { coloring } from "./coloring";
import { EpisodeTree } from "./EpisodeTree";
import { Facts } from "./Facts";
import { GroupList } from "./GroupList";
import { KeyHelp } from "./KeyHelp";
import { Legend } from "./Legend";
import { QUANTITIES, quantity } from "./quantities";
import { Response } from "./Response";
import { RouteView } from "./routes";
import { partingPlace } from "./segments";
import { TokenDetail } from "./TokenDetail";
import { tokenInLine, useKeys } from "./useKeys";
import { useRollouts } from "./useRollouts";

const NONE: Num[] = [];

interface Cursor {
  column: number;
  place: number;
  /** A click holds it, on a token or a turn: pointing elsewhere does not move it. */
  by: "mouse" | "key" | "click" | "turn";
}

interface PageProps {
  run: Run;
  runs: Run[];
  rolloutKey: string;
  query: URLSearchParams;
}

/** One response, and others of its group beside it. */
export function RolloutPage({ run, runs, rolloutKey, query }: PageProps) {
  const beside = (query.get("with") ?? "").split(",").filter(Boolean);
  const { rollouts, errors } = useRollouts(run.id, [rolloutKey, ...beside]);
  const [cursor, setCursor] = useState<Cursor | null>(null);
  const [isHelp, setHelp] = useState(false);
  useEffect(() => setCursor(null), [rolloutKey]);
  const main = rollouts[0];
  if (!main) return errors.length ? <Problem text={errors.join("; ")} /> : <p class="note">Loading ...</p>;
  return (
    <Loaded
      run={run}
      runs={runs}
      here={rolloutKey}
      beside={beside}
      rollouts={rollouts}
      errors={errors}
      query={query}
      cursor={cursor}
      setCursor={setCursor}
      isHelp={isHelp}
      setHelp={setHelp}
    />
  );
}

interface LoadedProps {
  run: Run;
  runs: Run[];
  here: string;
  beside: string[];
  rollouts: Rollout[];
  errors: string[];
  query: URLSearchParams;
  cursor: Cursor | null;
  setCursor: (cursor: Cursor | null) => void;
  isHelp: boolean;
  setHelp: (isHelp: boolean) => void;
}

function Loaded({ run, runs, here, beside, rollouts, errors, query, cursor, setCursor, isHelp, setHelp }: LoadedProps) {
  const main = rollouts[0];
  const routes = useMemo(
    () => rollouts.map(({ routes: sent, tokens }) => (sent ? new RouteView(sent, tokens.length) : null)),
    [rollouts],
  );
  const values = useMemo(
    () => rollouts.map((rollout, column) => withFlips(rollout, routes[column])),
    [rollouts, routes],
  );
  const available = QUANTITIES.filter(({ key }) => values[0][key]?.some((value) => value !== null)).map(
    ({ key }) => key,
  );
  const wanted = query.get("color");
  const chosen = wanted === "none" || (wanted && available.includes(wanted)) ? wanted : (available[0] ?? "none");
  const colors = useMemo(
    () =>
      coloring(
        quantity(chosen),
        values.flatMap((own, column) => sampled(rollouts[column], own[chosen] ?? [])),
      ),
    [values, chosen],
  );
  const partings = useMemo(() => {
    const places = rollouts.slice(1).map(({ tokens }) => partingPlace(main.tokens, tokens));
    return [places[0] ?? null, ...places];
  }, [rollouts]);
  const active = rollouts[cursor?.column ?? 0] ?? main;
  const column = Math.min(cursor?.column ?? 0, rollouts.length - 1);

  const move = (place: number | null) => {
    if (place === null) return;
    setCursor({ column, place: Math.max(0, Math.min(active.tokens.length - 1, place)), by: "key" });
  };
  const start = Math.max(
    0,
    active.tokens.findIndex(({ span }) => span !== "prompt"),
  );
  const by = (amount: number) => (event: KeyboardEvent) => {
    event.preventDefault();
    move(cursor ? cursor.place + amount : start);
  };
  const line = (direction: 1 | -1) => (event: KeyboardEvent) => {
    const box = document.querySelectorAll(".tokens")[column];
    if (!cursor || document.activeElement !== box) return; // else the page scrolls
    event.preventDefault();
    move(tokenInLine(box, cursor.place, direction));
  };
  const notable = (direction: 1 | -1) => () =>
    move(nextNotable(values[column], cursor?.place ?? start - direction, direction));
  const sibling = (amount: number) => () => {
    const keys = main.group.map(({ key }) => `${key}`).filter((key) => isThere(`runs/${run.id}/rollout/${key}`));
    const next = keys[keys.indexOf(here) + amount];
    if (next) location.hash = rolloutLink(run.id, next, chosen);
  };
  const recolor = (amount: number) => () => {
    const keys = [...available, "none"];
    setQuery({ color: keys[(keys.indexOf(chosen) + amount + keys.length) % keys.length] });
  };
  useKeys({
    ArrowRight: by(1),
    ArrowLeft: by(-1),
    ArrowDown: line(1),
    ArrowUp: line(-1),
    Home: (event) => {
      event.preventDefault();
      move(start);
    },
    End: (event) => {
      event.preventDefault();
      move(active.tokens.length - 1);
    },
    n: notable(1),
    p: notable(-1),
    j: sibling(1),
    k: sibling(-1),
    c: recolor(1),
    C: recolor(-1),
    Escape: () => setCursor(null),
    "?": () => setHelp(true),
  });
  return (
    <div class="rollout">
      <div class="controls">
        <h1>{`${main.meta.id ?? here}`}</h1>
        <a href={`#/run/${run.id}/rollouts`}>all rollouts</a>
        <PromptLink runs={runs} promptKey={main.prompt_key} />
        <button type="button" onClick={() => setHelp(true)}>
          Keys
        </button>
      </div>
      <Facts rollout={main} />
      <Warnings texts={[...rollouts.flatMap(({ missing }) => missing), ...errors]} />
      <GroupList run={run} group={main.group} here={here} beside={beside} color={query.get("color")} />
      {main.episode && (
        <EpisodeTree
          run={run.id}
          here={main.key ?? here}
          episode={main.episode}
          cursor={cursor?.column ? null : (cursor?.place ?? null)}
          color={query.get("color")}
          onTurn={(place) => setCursor({ column: 0, place, by: "turn" })}
        />
      )}
      <Legend chosen={chosen} available={available} coloring={colors} />
      <div class="reading">
        <div class={`columns of-${rollouts.length}`}>
          {rollouts.map((rollout, place) => (
            <Response
              key={rollout.key ?? place}
              rollout={rollout}
              routes={routes[place]}
              values={values[place][chosen] ?? NONE}
              colors={colors}
              hasHead={rollouts.length > 1}
              parting={partings[place]}
              cursor={cursor?.column === place ? cursor.place : null}
              isFollowed={cursor?.by === "key" || cursor?.by === "turn"}
              onHover={(at) => {
                if (cursor?.by !== "click" && cursor?.by !== "turn")
                  setCursor({ column: place, place: at, by: "mouse" });
              }}
              onPick={(at) => {
                const isSame = cursor?.by === "click" && cursor.column === place && cursor.place === at;
                setCursor(isSame ? null : { column: place, place: at, by: "click" });
              }}
            />
          ))}
        </div>
        <TokenDetail
          rollout={{ ...active, values: values[column] }}
          routes={routes[column]}
          place={cursor?.place ?? null}
          onClose={() => setCursor(null)}
        />
      </div>
      {isHelp && <KeyHelp onClose={() => setHelp(false)} />}
    </div>
  );
}

/** Flips are counted from the routes where they are there: the same rows as in the strip. */
function withFlips(rollout: Rollout, routes: RouteView | null): Record<string, Num[]> {
  if (!routes?.hasFlips) return rollout.values;
  return { ...rollout.values, flips: rollout.tokens.map((_, place) => routes.numFlips(place)) };
}

function sampled(rollout: Rollout, values: Num[]): Num[] {
  return values.filter((_, place) => rollout.tokens[place]?.span === "model");
}

/** The next token with a flip; where there is none in the response, the next clipped one. */
function nextNotable(values: Record<string, Num[]>, from: number, direction: 1 | -1): number | null {
  const counts = values.flips?.some((value) => value) ? values.flips : (values.clipped ?? []);
  for (let place = from + direction; place >= 0 && place < counts.length; place += direction) {
    if (counts[place]) return place;
  }
  return null;
}
