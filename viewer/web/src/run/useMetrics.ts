// The metrics of several runs, read once and then only what is new.

import { useEffect, useState } from "preact/hooks";
import { get } from "../client";
import type { Metrics, Num, Run } from "../types";
import { poll } from "../useData";

export type MetricsOf = Record<number, Metrics>;

export function useMetrics(runs: Run[]): { metrics: MetricsOf; error: string | null } {
  const [metrics, setMetrics] = useState<MetricsOf>({});
  const [error, setError] = useState<string | null>(null);
  const ids = runs.map(({ id, revision }) => `${id} ${revision}`).join();
  useEffect(() => {
    const abort = new AbortController();
    let known: MetricsOf = {};
    const load = async () => {
      for (const { id } of runs) {
        const last = known[id]?.steps.at(-1);
        const fresh = await get<Metrics>(
          `runs/${id}/metrics${last === undefined ? "" : `?after=${last}`}`,
          abort.signal,
        );
        if (!known[id] || fresh.steps.length || fresh.evaluations.steps.length) {
          known = { ...known, [id]: known[id] ? joined(known[id], fresh) : fresh };
        }
      }
      setMetrics(known);
      setError(null);
    };
    const guarded = () =>
      load().catch((problem: Error) => {
        if (!abort.signal.aborted) setError(problem.message);
      });
    void guarded();
    const stop = poll(guarded);
    return () => {
      abort.abort();
      stop();
    };
  }, [ids]);
  return { metrics, error };
}

/** `before` and then `after`; a resumed run writes steps again, and the later ones count. */
export function joined(before: Metrics, after: Metrics): Metrics {
  const first = after.steps[0] ?? Infinity;
  const kept = before.steps.findIndex((step) => step >= first);
  const length = kept < 0 ? before.steps.length : kept;
  return {
    steps: [...before.steps.slice(0, length), ...after.steps],
    metrics: joinedColumns(before.metrics, after.metrics, length, after.steps.length),
    per_layer: joinedColumns(before.per_layer, after.per_layer, length, after.steps.length),
    evaluations: joinedEvaluations(before.evaluations, after.evaluations),
    labels: { ...before.labels, ...after.labels },
  };
}

function joinedColumns<T>(
  before: Record<string, (T | null)[]>,
  after: Record<string, (T | null)[]>,
  length: number,
  added: number,
): Record<string, (T | null)[]> {
  const names = new Set([...Object.keys(before), ...Object.keys(after)]);
  const column = (values: (T | null)[] | undefined, size: number) =>
    values?.slice(0, size) ?? new Array<T | null>(size).fill(null);
  return Object.fromEntries(
    [...names].map((name) => [name, [...column(before[name], length), ...column(after[name], added)]]),
  );
}

function joinedEvaluations(before: Metrics["evaluations"], after: Metrics["evaluations"]): Metrics["evaluations"] {
  const fresh = new Set(after.steps);
  const places = before.steps.map((_, place) => place).filter((place) => !fresh.has(before.steps[place]));
  const old: Record<string, Num[]> = Object.fromEntries(
    Object.entries(before.metrics).map(([name, values]) => [name, places.map((place) => values[place])]),
  );
  return {
    steps: [...places.map((place) => before.steps[place]), ...after.steps],
    metrics: joinedColumns(old, after.metrics, places.length, after.steps.length),
  };
}
