// The events of several runs, in the order in which they happened.

import { useMemo } from "preact/hooks";
import { get } from "../client";
import type { Run, RunEvent } from "../types";
import { useLoaded } from "../useData";

export function useEvents(runs: Run[]): { events: RunEvent[]; error: string | null } {
  const { data, error } = useLoaded(
    runs.map(({ id }) => id).join(),
    (signal) => Promise.all(runs.map(({ id }) => get<RunEvent[]>(`runs/${id}/events`, signal))),
    runs.some(({ live }) => live),
  );
  const events = useMemo(() => {
    const all = (data ?? []).flatMap((ofRun, run) => ofRun.map((event) => ({ ...event, run })));
    return runs.length > 1 ? all.sort((a, b) => (a.time ?? 0) - (b.time ?? 0)) : all;
  }, [data]);
  return { events, error };
}
