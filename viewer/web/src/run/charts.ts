// Which curves the run page shows, in which order, and under which names.

import type { MetricsOf } from "./useMetrics";

export interface ChartSpec {
  name: string;
  label: string;
  source: "metrics" | "evaluations";
}

/** Metrics of the first screen, in this order, where the run has them. */
export const MAIN: Record<string, string> = {
  "rollout/reward_mean": "reward, mean",
  "rollout/response_length_mean": "response tokens, mean",
  "train/entropy": "entropy (nats per token)",
  "train/kl_mu_pi": "KL(mu, pi_old)",
  "train/logratio_abs_mean": "mean |log mu - log pi_old|",
  "logratio/train_infer_p99": "p99 |log pi_old - log mu|",
  "train/ess": "effective sample size",
  "train/clip_frac": "clipped tokens",
  "routing/router_mismatch": "router mismatch, live",
  "routing/replayed_mismatch": "router mismatch, used",
  "optim/grad_norm": "gradient norm",
  "time/step": "seconds per step",
};

/** Charts whose name or label has every word of `search`; without a search the main ones, or all. */
export function chartsOf(metrics: MetricsOf, search: string, isAll: boolean): ChartSpec[] {
  const names = (source: ChartSpec["source"]) =>
    new Set(
      Object.values(metrics).flatMap((run) =>
        Object.keys(source === "metrics" ? run.metrics : run.evaluations.metrics),
      ),
    );
  const found = names("metrics");
  const spec = (name: string, source: ChartSpec["source"]): ChartSpec => ({ name, label: MAIN[name] ?? name, source });
  const evaluations = [...names("evaluations")].sort().map((name) => spec(name, "evaluations"));
  const scores = evaluations.filter(({ name }) => /(avg|pass|maj)@/.test(name));
  const main = Object.keys(MAIN)
    .filter((name) => found.has(name))
    .map((name) => spec(name, "metrics"));
  const rest = [...found]
    .filter((name) => !(name in MAIN))
    .sort()
    .map((name) => spec(name, "metrics"));
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...main, ...evaluations, ...rest];
  if (words.length)
    return all.filter(({ name, label }) => words.every((word) => `${name} ${label}`.toLowerCase().includes(word)));
  return isAll || !main.length ? all : [...main, ...scores];
}
