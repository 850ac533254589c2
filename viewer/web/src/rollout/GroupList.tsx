import { useEffect, useRef } from "preact/hooks";
import { isThere } from "../client";
import { number } from "../format";
import { rolloutLink, setQuery } from "../route";
import type { Row, Run } from "../types";

interface Props {
  run: Run;
  group: Row[];
  here: string;
  beside: string[];
  color: string | null;
}

/** The responses to the same prompt: open one, or put it beside this one. */
export function GroupList({ run, group: all, here, beside, color }: Props) {
  const group = all.filter(({ key }) => isThere(`runs/${run.id}/rollout/${key}`));
  const box = useRef<HTMLElement>(null);
  useEffect(() => {
    const own = box.current?.querySelector<HTMLElement>(".here");
    if (own && box.current) box.current.scrollLeft = own.offsetLeft - box.current.clientWidth / 2;
  }, [here]);
  if (group.length < 2) return null;
  const toggle = (key: string) => {
    const next = beside.includes(key) ? beside.filter((other) => other !== key) : [...beside, key].slice(-3);
    setQuery({ with: next.join(",") });
  };
  return (
    <nav class="group" ref={box} aria-label="Responses of the group">
      {group.map((row) => {
        const key = `${row.key}`;
        const isHere = key === here;
        return (
          <div key={key} class={`member${isHere ? " here" : ""}`}>
            <a href={rolloutLink(run.id, key, color)} aria-current={isHere ? "page" : undefined}>
              <b>{number(row.reward, 3)}</b> <span class="note">{number(row.length)} tokens</span>
            </a>
            {!isHere && (
              <button
                type="button"
                aria-pressed={beside.includes(key)}
                title="show beside this response"
                onClick={() => toggle(key)}
              >
                beside
              </button>
            )}
          </div>
        );
      })}
    </nav>
  );
}
