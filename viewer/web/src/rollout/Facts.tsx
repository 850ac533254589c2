import { number, percent } from "../format";
import type { Rollout } from "../types";

const MAIN: [string, string, (value: unknown) => string][] = [
  ["step", "step", number],
  ["reward", "reward", number],
  ["advantage", "advantage", number],
  ["response_length", "tokens", number],
  ["kl", "KL(mu, pi_old)", number],
  ["max_log_ratio", "largest log-ratio", number],
  ["clipped_frac", "clipped", percent],
  ["flip_frac", "flips", percent],
  ["finish_reason", "finish", (value) => `${value as string}`],
  ["num_turns", "turns", number],
  ["label", "label", (value) => `${value as string}`],
];
const TEXTS = new Set(["prompt", "response", "messages", "trained"]); // shown elsewhere

/** The main numbers of a response in one line; every recorded field below. */
export function Facts({ rollout }: { rollout: Rollout }) {
  const meta: Record<string, unknown> = { ...(rollout.meta.trained as object | null), ...rollout.meta };
  const all = Object.entries(meta).filter(([name]) => !TEXTS.has(name));
  return (
    <>
      <dl class="facts">
        {MAIN.filter(([name]) => meta[name] != null && meta[name] !== "").map(([name, label, format]) => (
          <div key={name}>
            <dt>{label}</dt>
            <dd>{format(meta[name])}</dd>
          </div>
        ))}
      </dl>
      <details>
        <summary>every field</summary>
        <dl class="numbers wide">
          {all.map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{typeof value === "object" ? JSON.stringify(value) : number(value)}</dd>
            </div>
          ))}
        </dl>
      </details>
    </>
  );
}
