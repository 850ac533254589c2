import { memo } from "./memo";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Token } from "../types";
import { count } from "../format";
import { segments, type Chunk } from "./segments";

interface Props {
  label: string;
  tokens: Token[];
  classes: string[];
  cursor: number | null;
  /** The cursor was moved by a key: the text follows it. */
  isFollowed: boolean;
  parting: number | null;
  onHover: (place: number) => void;
  onPick: (place: number) => void;
}

const NAMES = { prompt: "prompt", model: "model", environment: "environment" };

/** The text token by token.  A chunk far from the screen is one text node: 32,000 tokens scroll without delay. */
export function TokenText({ label, tokens, classes, cursor, isFollowed, parting, onHover, onPick }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const mouse = useRef("");
  const parts = useMemo(() => segments(tokens), [tokens]);
  useEffect(() => {
    if (cursor === null || !box.current) return;
    const shown = box.current.querySelector<HTMLElement>(`[data-place="${cursor}"]`);
    shown?.setAttribute("aria-current", "true");
    if (isFollowed) shown?.scrollIntoView({ block: "nearest" });
    return () => shown?.removeAttribute("aria-current");
  }, [cursor, isFollowed, classes]);
  const placeOf = (event: Event) => {
    const place = (event.target as HTMLElement).dataset?.place;
    return place === undefined ? null : Number(place);
  };
  return (
    <div
      class="tokens"
      ref={box}
      role="group"
      aria-label={label}
      tabIndex={0}
      onMouseMove={(event) => {
        const at = `${event.clientX} ${event.clientY}`;
        const isScroll = at === mouse.current; // the text moved, not the mouse
        mouse.current = at;
        const place = placeOf(event);
        if (place !== null && place !== cursor && !isScroll) onHover(place);
      }}
      onClick={(event) => {
        const place = placeOf(event);
        if (place !== null) onPick(place);
      }}
    >
      {parts.map(({ span, from, to, chunks }) => (
        <section key={from} class={`span ${span}`} aria-label={NAMES[span]}>
          <h3>
            {NAMES[span]} <span class="note">{count(to - from, "token")}</span>
          </h3>
          <div class="text">
            {chunks.map((chunk) => (
              <ChunkText
                key={chunk.from}
                chunk={chunk}
                tokens={tokens}
                classes={classes}
                isForced={cursor !== null && cursor >= chunk.from && cursor < chunk.to}
                parting={parting !== null && parting >= chunk.from && parting < chunk.to ? parting : null}
              />
            ))}
          </div>
        </section>
      ))}
    </div>
  );
}

interface ChunkProps {
  chunk: Chunk;
  tokens: Token[];
  classes: string[];
  isForced: boolean;
  parting: number | null;
}

const ChunkText = memo(function ChunkText({ chunk, tokens, classes, isForced, parting }: ChunkProps) {
  const place = useRef<HTMLSpanElement>(null);
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setNear(entries[entries.length - 1].isIntersecting), {
      rootMargin: "800px",
    });
    if (place.current) observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  const own = tokens.slice(chunk.from, chunk.to);
  return (
    <span ref={place}>
      {isNear || isForced || parting !== null
        ? own.map(({ text }, offset) => (
            <OneToken
              key={offset}
              text={text}
              place={chunk.from + offset}
              name={classes[chunk.from + offset]}
              isParting={chunk.from + offset === parting}
            />
          ))
        : own.map(({ text }) => text).join("")}
    </span>
  );
});

function OneToken({ text, place, name, isParting }: { text: string; place: number; name: string; isParting: boolean }) {
  const isBlank = text.trim() === "" && text.includes("\n");
  const token = (
    <span data-place={place} class={`t ${name}${isParting ? " parting" : ""}${isBlank ? " newline" : ""}`}>
      {text}
    </span>
  );
  if (!isParting) return token;
  return (
    <>
      <span class="parts" role="img" aria-label="the responses part here" />
      {token}
    </>
  );
}
