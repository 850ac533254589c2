import { useEffect, useRef, useState } from "preact/hooks";
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

/** A mark for each response to the same prompt, its height by its reward: open one, or while "Compare" is on, put it
 *  beside this one. */
export function GroupList({ run, group: all, here, beside, color }: Props) {
  const group = all.filter(({ key }) => isThere(`runs/${run.id}/rollout/${key}`));
  const box = useRef<HTMLElement>(null);
  const [isComparing, setComparing] = useState(beside.length > 0);
  useEffect(() => {
    const own = box.current?.querySelector<HTMLElement>(".here");
    if (own && box.current) box.current.scrollLeft = own.offsetLeft - box.current.clientWidth / 2;
  }, [here]);
  if (group.length < 2) return null;
  const toggle = (key: string) => {
    const next = beside.includes(key) ? beside.filter((other) => other !== key) : [...beside, key].slice(-3);
    setQuery({ with: next.join(",") });
  };
  const share = shareOf(group);
  return (
    <div class="controls">
      <nav class="group" ref={box} aria-label="Responses of the group">
        {group.map((row) => {
          const key = `${row.key}`;
          return (
            <Mark
              key={key}
              row={row}
              share={share(row)}
              link={rolloutLink(run.id, key, color)}
              isHere={key === here}
              isBeside={beside.includes(key)}
              onClick={(event) => {
                if (!isComparing || key === here) return;
                event.preventDefault();
                toggle(key);
              }}
            />
          );
        })}
      </nav>
      <button
        type="button"
        aria-pressed={isComparing}
        title="while this is on, a click on a mark shows that response beside this one"
        onClick={() => {
          if (isComparing) setQuery({ with: null });
          setComparing(!isComparing);
        }}
      >
        Compare
      </button>
    </div>
  );
}

interface MarkProps {
  row: Row;
  share: number;
  link: string;
  isHere?: boolean;
  isBeside?: boolean;
  onClick?: (event: MouseEvent) => void;
}

/** A response, which it opens; its height is `share`, 0 to 1. */
export function Mark({ row, share, link, isHere, isBeside, onClick }: MarkProps) {
  const text = `reward ${number(row.reward, 3)}, ${number(row.length)} tokens`;
  return (
    <a
      class={`member${isHere ? " here" : ""}${isBeside ? " beside" : ""}`}
      href={link}
      aria-current={isHere ? "page" : undefined}
      aria-label={`${text}${isBeside ? ", shown beside" : ""}`}
      title={text}
      onClick={onClick}
    >
      <i style={{ height: `${Math.round(20 + 80 * share)}%` }} />
    </a>
  );
}

/** The place of a row's reward between the least and the largest of these; 1 where all are equal. */
export function shareOf(group: Row[]): (row: Row) => number {
  const rewards = group.map(({ reward }) => reward).filter((reward) => typeof reward === "number");
  const [least, largest] = [Math.min(...rewards), Math.max(...rewards)];
  return ({ reward }) => {
    if (typeof reward !== "number") return 0;
    return largest > least ? (reward - least) / (largest - least) : 1;
  };
}
