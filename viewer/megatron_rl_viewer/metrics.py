"""The metrics.jsonl and events.jsonl of a run in memory, followed while it runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.lines import MetricLines
from megatron_rl_viewer.follow import FilePlace, after, cut_line, is_rewritten, new_lines

EVALUATION = "eval/"
LABELS = {
    "sft/loss": "loss",
    "rollout/reward_mean": "reward, training prompts",
    "rollout/response_length_mean": "response tokens",
    "rollout/turns_mean": "turns of an episode",
    "rollout/environment_length_mean": "masked tokens, which an environment wrote, per episode",
    "rollout/truncated_frac": "responses cut at the length limit",
    "rollout/environment_seconds_mean": "seconds per episode outside sampling",
    "train/entropy": "entropy (nats per token)",
    "train/kl_mu_pi": "KL(mu, pi_old), k1",
    "teacher/reverse_kl": "KL(mu, pi_T), the reverse KL to the teachers",
    "train/logratio_abs_mean": "mean abs(log mu - log pi_old)",
    "logratio/train_infer_p99": "99 % of the tokens: abs(log pi_old - log mu) at most",
    "logratio/staleness_p99": "99 % of the tokens: abs(log pi - log pi_old) at most",
    "logratio/f2_frac": "F(2): tokens that the engines see with a probability over 2 x apart",
    "first_order/total_median": "first-order approximation: what it leaves out, median sequence",
    "first_order/total_p95": "the same, 95 % of the sequences at most",
    "train/ess": "effective sample size of the importance weights",
    "train/clip_frac": "clipped tokens",
    "train/nonfinite_frac": "tokens with a non-finite log-prob",
    "optim/skipped_updates": "updates skipped for a non-finite gradient",
    "rollout/zero_advantage_groups_frac": "prompts whose responses all score the same",
    "routing/router_mismatch": "experts that differ, trainer alone",
    "routing/replayed_mismatch": "experts that differ, used in training",
    "routing/replaced_gate_mass": "gate weight of those experts, trainer alone",
    "routing/flipped_margin": "k-th minus next score where they differ",
    "routing/kept_margin": "the same where they agree",
    "replay/missing_route_frac": "response tokens without a route",
    "replay/prompt_missing_route_frac": "prompt tokens without a route",
    "optim/grad_norm": "gradient norm",
    "time/step": "seconds per step",
}
"""The main metrics in words, for charts and report.html."""


class MetricsFile:
    """The metrics of a run by step, counted as in the file: finished steps, the first is 1.

    If a step was written again, the later values count.  `revision` grows whenever a known step
    changed: a client that asked only for later steps then asks for all again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = RunFolder(folder).metrics
        self.revision = 0
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._place, self._lines = FilePlace(), MetricLines()
        self._metrics: dict[int, dict[str, float]] = {}
        self._per_layer: dict[int, dict[str, list[float]]] = {}
        self.warnings: list[str] = []

    def update(self) -> None:
        with self._lock:
            if is_rewritten(self.path, self._place):
                self._clear()
                self.revision += 1
            for line in new_lines(self.path, self._place):
                self._place = after(self._place, line)
                if not line.data.strip():
                    continue
                try:
                    step, _, metrics, per_layer = self._lines.parse(line.data)
                except ValueError as error:
                    self.warnings.append(f"{self.path.name}:{line.number}: {error}")
                    continue
                self.revision += step in self._metrics
                self._metrics[step] = self._metrics.get(step, {}) | metrics
                self._per_layer[step] = self._per_layer.get(step, {}) | per_layer

    @property
    def all_warnings(self) -> list[str]:
        cut = cut_line(self.path, self._place)
        return [*self.warnings, *([cut] if cut else [])]

    @property
    def last_step(self) -> int:
        with self._lock:  # another thread may add steps
            return max((step for step, row in self._metrics.items() if is_training(row)), default=0)

    @property
    def num_layers(self) -> int:
        with self._lock:
            rows = self._per_layer.values()
            return max((len(values) for row in rows for values in row.values()), default=0)

    def table(self, after_step: int = -1, names: Sequence[str] = ()) -> dict:
        """Return {"steps", "metrics", "per_layer", "evaluations", "labels"} of the steps >
        after_step, with one value per step, NaN if there is none.
        """
        with self._lock:
            rows = {step: row for step, row in sorted(self._metrics.items()) if step > after_step}
            per_layer = {step: self._per_layer[step] for step in rows}
        trained = [step for step, row in rows.items() if is_training(row)]
        evaluated = [
            step for step, row in rows.items() if any(name.startswith(EVALUATION) for name in row)
        ]
        known = {name for row in rows.values() for name in row if not names or name in names}
        layered = {name for row in per_layer.values() for name in row if not names or name in names}
        evaluations = sorted(name for name in known if name.startswith(EVALUATION))
        metrics = sorted(known.difference(evaluations))

        def columns(steps: Sequence[int], wanted: Sequence[str]) -> dict[str, list[float]]:
            return {name: [rows[step].get(name, math.nan) for step in steps] for name in wanted}

        return {
            "steps": trained,
            "metrics": columns(trained, metrics),
            "per_layer": {
                name: [per_layer[step].get(name, []) for step in trained]
                for name in sorted(layered)
            },
            "evaluations": {"steps": evaluated, "metrics": columns(evaluated, evaluations)},
            "labels": {name: LABELS[name] for name in metrics if name in LABELS},
        }


def is_training(row: dict[str, float]) -> bool:
    """Return whether the row has more than evaluations."""
    return any(not name.startswith(EVALUATION) for name in row)


class EventsFile:
    """The events of a run: {"time", "step", "kind", "text", "seconds"?} per line, as
    trainer/events.py writes them.
    """

    def __init__(self, folder: Path) -> None:
        self.path = RunFolder(folder).events
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._place = FilePlace()
        self.events: list[dict] = []
        self.warnings: list[str] = []

    def update(self) -> None:
        with self._lock:
            if is_rewritten(self.path, self._place):
                self._clear()
            for line in new_lines(self.path, self._place):
                self._place = after(self._place, line)
                try:
                    event = json.loads(line.data)
                    if not isinstance(event["step"], int) or not isinstance(event["kind"], str):
                        raise TypeError("step must be an integer and kind a text")
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    self.warnings.append(f"{self.path.name}:{line.number}: not an event: {error!r}")
                    continue
                self.events.append(event)

    def since(self, step: int) -> list[dict]:
        return [event for event in self.events if event["step"] > step]
