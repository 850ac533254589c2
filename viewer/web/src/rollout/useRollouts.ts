// The rollouts of the page, in the order of their keys; each is read once.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get } from "../client";
import type { Rollout } from "../types";

type Answer = Rollout | Error;

export function useRollouts(run: number, keys: string[]): { rollouts: Rollout[]; errors: string[] } {
  const known = useRef(new Map<string, Answer>());
  const [version, setVersion] = useState(0);
  const names = keys.map((key) => `runs/${run}/rollout/${key}`);
  useEffect(() => {
    for (const old of known.current.keys()) if (!names.includes(old)) known.current.delete(old);
    const abort = new AbortController();
    for (const name of names) {
      if (known.current.has(name)) continue;
      const keep = (answer: Answer) => {
        if (abort.signal.aborted) return;
        known.current.set(name, answer);
        setVersion((before) => before + 1);
      };
      get<Rollout>(name, abort.signal).then(keep, keep);
    }
    return () => abort.abort();
  }, [names.join()]);
  return useMemo(() => {
    const answers = names.map((name) => known.current.get(name));
    if (!(answers[0] && !(answers[0] instanceof Error))) {
      return { rollouts: [], errors: answers[0] instanceof Error ? [answers[0].message] : [] };
    }
    return {
      rollouts: answers.filter((answer): answer is Rollout => answer !== undefined && !(answer instanceof Error)),
      errors: answers.flatMap((answer) => (answer instanceof Error ? [answer.message] : [])),
    };
  }, [names.join(), version]);
}
