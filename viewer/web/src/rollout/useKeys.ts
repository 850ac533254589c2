// The keyboard of the rollout page.

import { useEffect, useRef } from "preact/hooks";

export type Actions = Record<string, (event: KeyboardEvent) => void>;

/** Calls the action of a key, unless a field or an open dialog has the keyboard. */
export function useKeys(actions: Actions): void {
  const current = useRef(actions);
  current.current = actions; // at once: a second key may come before effects run
  useEffect(() => {
    const onKeyDown = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      const isField = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || document.querySelector("dialog[open]");
      if (isField || event.ctrlKey || event.metaKey || event.altKey || !(event.key in current.current)) return;
      current.current[event.key](event);
    };
    window.addEventListener("keydown", onKeyDown);
    return () => window.removeEventListener("keydown", onKeyDown);
  }, []);
}

/** The token in the line above (-1) or below (1) of `place`; null at the first and last line. */
export function tokenInLine(box: Element | null, place: number, direction: 1 | -1): number | null {
  const rect = box?.querySelector(`[data-place="${place}"]`)?.getClientRects()[0];
  if (!rect) return null;
  for (let lines = 1; lines <= 4; lines++) {
    // an empty line has no token
    const y = rect.top + rect.height / 2 + direction * lines * rect.height * 1.25;
    const found = document
      .elementFromPoint(rect.left + Math.min(8, rect.width / 2), y)
      ?.closest<HTMLElement>("[data-place]");
    if (found && box?.contains(found) && Number(found.dataset.place) !== place) return Number(found.dataset.place);
  }
  return null;
}
