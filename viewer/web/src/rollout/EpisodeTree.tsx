import { isThere } from "../client";
import { count, number } from "../format";
import { rolloutLink } from "../route";
import type { Episode, Said, Turn } from "../types";

interface Props {
  run: number;
  /** The sequence that this page shows. */
  here: string;
  episode: Episode;
  /** Place of the cursor in this sequence. */
  cursor: number | null;
  color: string | null;
  onTurn: (place: number) => void;
}

/** The turns of an episode.  Turns that follow one another are one list; where sequences part, the others are indented. */
export function EpisodeTree({ run, here, episode, cursor, color, onTurn }: Props) {
  const { prompt, turns } = episode;
  const below = new Map<number | null, number[]>();
  turns.forEach(({ parent }, place) => below.set(parent, [...(below.get(parent) ?? []), place]));
  const sequences = new Set(turns.map(({ key }) => key)).size;

  /** The turn that continues the list after this one; null where it ends, or parts into other sequences alone. */
  const nextOf = (place: number): number | null => {
    const options = below.get(place) ?? [];
    return options.find((other) => turns[other].key === turns[place].key) ?? (options.length === 1 ? options[0] : null);
  };
  const chain = (first: number) => {
    const places: number[] = [];
    for (let place: number | null = first; place !== null; place = nextOf(place)) places.push(place);
    return (
      <ol key={first}>
        {places.map((place) => {
          const turn = turns[place];
          return (
            <li key={place} aria-current={hasCursor(turn, here, cursor) ? "true" : undefined}>
              <TurnHead
                turn={turn}
                isHere={turn.key === here}
                link={isThere(`runs/${run}/rollout/${turn.key}`) ? rolloutLink(run, turn.key, color) : null}
                onTurn={onTurn}
              />
              <Messages texts={turn.before ?? []} other="environment" />
              {turn.text && <Message role="model" text={turn.text} />}
              {turn.calls?.map((call, order) => (
                <p key={order} class="said">
                  <b>model calls</b> <code>{call}</code>
                </p>
              ))}
              {(below.get(place) ?? []).filter((other) => other !== nextOf(place)).map(chain)}
            </li>
          );
        })}
      </ol>
    );
  };
  return (
    <details class="episode" open>
      <summary>
        Episode{" "}
        <span class="note">
          {count(turns.length, "turn")}
          {sequences > 1 && ` in ${count(sequences, "sequence")}`}
        </span>
      </summary>
      <div class="tree" role="group" aria-label="Turns of the episode" tabIndex={0}>
        <Messages texts={prompt} other="prompt" />
        {(below.get(null) ?? []).map(chain)}
      </div>
    </details>
  );
}

function hasCursor({ key, place, sampled }: Turn, here: string, cursor: number | null): boolean {
  return key === here && cursor !== null && place !== undefined && cursor >= place && cursor < place + (sampled ?? 0);
}

interface HeadProps {
  turn: Turn;
  isHere: boolean;
  link: string | null;
  onTurn: (place: number) => void;
}

/** Its number and name, which lead to its first token, and its numbers. */
function TurnHead({ turn, isHere, link, onTurn }: HeadProps) {
  const { place, sampled, masked, reward, finish } = turn;
  const name = `turn ${turn.number}`;
  const facts = [
    sampled !== undefined && `${count(sampled, "token")} sampled`,
    !!masked && `${count(masked, "token")} masked`,
    reward !== null && `reward ${number(reward)}`,
    finish,
    turn.environment_seconds !== null && `environment ${number(turn.environment_seconds, 3)} s`,
    turn.model_seconds !== null && `model ${number(turn.model_seconds, 3)} s`,
  ].filter(Boolean);
  return (
    <p class="turn">
      {isHere && place !== undefined && (
        <button type="button" onClick={() => onTurn(place)}>
          {name}
        </button>
      )}
      {isHere && place === undefined && <b>{name}</b>}
      {!isHere && (link ? <a href={link}>{`${name} of ${turn.id}`}</a> : <b>{`${name} of ${turn.id}`}</b>)}{" "}
      <span class="note">{facts.join(", ")}</span>
    </p>
  );
}

function Messages({ texts, other }: { texts: Said[]; other: string }) {
  return (
    <>
      {texts.map(({ role, text }, order) => (
        <Message key={order} role={role || other} text={text} />
      ))}
    </>
  );
}

const SHORT = 160;

/** A text of one short line; of a longer one the beginning, and all of it when that is opened. */
function Message({ role, text }: { role: string; text: string }) {
  const line = text.slice(0, SHORT).split("\n", 1)[0];
  if (line.length === text.length) {
    return (
      <p class="said">
        <b>{role}</b> {text}
      </p>
    );
  }
  return (
    <details class="said">
      <summary>
        <b>{role}</b> {line} ...
      </summary>
      <pre>{text}</pre>
    </details>
  );
}
