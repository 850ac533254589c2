// Which curves the run page shows, in which order, and under which names.

import type { MetricsOf } from "./useMetrics";

/** First and last step that are shown; null for all. */
export type Zoom = [number, number] | null;

export interface ChartSpec {
  name: string;
  label: string;
  source: "metrics" | "evaluations";
}

/** Metrics of the first screen, in this order, where the run has them. */
const MAIN = [
  "sft/loss",
  "rollout/reward_mean",
  "rollout/response_length_mean",
  "train/entropy",
  "train/kl_mu_pi",
  "train/logratio_abs_mean",
  "logratio/train_infer_p99",
  "train/ess",
  "train/clip_frac",
  "routing/router_mismatch",
  "routing/replayed_mismatch",
  "optim/grad_norm",
  "time/step",
];

/** Charts whose name or label has every word of `search`; without a search the main ones, or all. */
export function chartsOf(metrics: MetricsOf, search: string, isAll: boolean): ChartSpec[] {
  const names = (source: ChartSpec["source"]) =>
    new Set(
      Object.values(metrics).flatMap((run) =>
        Object.keys(source === "metrics" ? run.metrics : run.evaluations.metrics),
      ),
    );
  const found = names("metrics");
  const labels: Record<string, string> = Object.assign({}, ...Object.values(metrics).map((run) => run.labels));
  const spec = (name: string, source: ChartSpec["source"]): ChartSpec => ({
    name,
    label: labels[name] ?? name,
    source,
  });
  const evaluations = [...names("evaluations")].sort().map((name) => spec(name, "evaluations"));
  // not the ends of intervals, nor metrics of the user's functions, whatever their names
  const scores = evaluations.filter(
    ({ name }) => /\/((avg|pass|maj)@\d+|loss)$/.test(name) && !/^eval\/.+\/(reward|episode)\//.test(name),
  );
  const main = MAIN.filter((name) => found.has(name)).map((name) => spec(name, "metrics"));
  const rest = [...found]
    .filter((name) => !MAIN.includes(name))
    .sort()
    .map((name) => spec(name, "metrics"));
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...main, ...evaluations, ...rest];
  if (words.length)
    return all.filter(({ name, label }) => words.every((word) => `${name} ${label}`.toLowerCase().includes(word)));
  return isAll || !main.length ? all : [...main, ...scores];
}
