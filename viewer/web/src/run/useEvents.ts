// The events of several runs, in the order in which they happened.

import { useEffect, useState } from "preact/hooks";
import { get } from "../client";
import type { Run, RunEvent } from "../types";
import { poll } from "../useData";

export function useEvents(runs: Run[]): { events: RunEvent[]; error: string | null } {
  const [events, setEvents] = useState<RunEvent[]>([]);
  const [error, setError] = useState<string | null>(null);
  const ids = runs.map(({ id }) => id).join();
  const isLive = runs.some(({ live }) => live);
  useEffect(() => {
    const abort = new AbortController();
    const load = async () => {
      const found = await Promise.all(runs.map(({ id }) => get<RunEvent[]>(`runs/${id}/events`, abort.signal)));
      const all = found.flatMap((ofRun, run) => ofRun.map((event) => ({ ...event, run })));
      setEvents(found.length > 1 ? all.sort((a, b) => (a.time ?? 0) - (b.time ?? 0)) : all);
      setError(null);
    };
    const guarded = () =>
      load().catch((problem: Error) => {
        if (!abort.signal.aborted) setError(problem.message);
      });
    void guarded();
    const stop = isLive ? poll(guarded) : () => {};
    return () => {
      abort.abort();
      stop();
    };
  }, [ids, isLive]);
  return { events, error };
}
