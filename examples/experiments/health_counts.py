"""Counts of the runs of an experiment that the rules of health name, at their ends and before their
collapses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from examples.experiments.analyse import Run
from megatron_rl.config import ReplayConfig
from megatron_rl.metrics.health import examine


def health_table(lines: Iterable[Sequence[Run]]) -> str:
    """Count the runs that the rules of health name at the last step and before the collapse, by
    table and end of the run.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    for run in (run for runs in lines for run in runs):
        steps, collapse = len(run.curve("rollout/reward_mean")), run.collapse_step
        end = "stable" if collapse is None else "collapsed"
        count = counts.setdefault((run.data["table"], end), Counter(runs=0))
        count["runs"] += 1
        named = health_levels(run, steps)
        count["named"] += bool(named)
        count["bad"] += "bad" in named.values()
        count["by another rule"] += bool(named.keys() - {"rollout/reward_mean"})
        count["first-order error"] += "first_order/total_p95" in named
        before = range(1, collapse or 0)
        count["before"] += any(health_levels(run, step) for step in before)
    names = ("runs", "named", "bad", "by another rule", "first-order error", "before")
    head = ("table", "end", "runs", "named", "bad", "by a rule but the reward's")
    head += ("first-order error", "named before")
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (table, end), count in counts.items():
        rows.append(f"| {table} | {end} | {' | '.join(str(count[name]) for name in names)} |")
    title = "What health says at the last step, and before the step of the collapse:"
    return title + "\n\n" + "\n".join(rows) + "\n"


def health_levels(run: Run, steps: int) -> dict[str, str]:
    """Return metric -> level of the rules that hold at the end of the run's first steps."""
    columns = {name: run.curve(name)[:steps] for name in run.data["columns"]}
    replay = run.table.lines[run.data["line"]].settings.get("replay", {})
    settings = {"replay.mode": replay.get("mode", ReplayConfig().mode)}
    findings = examine(list(range(1, steps + 1)), columns, settings)
    return {finding.metric: finding.level for finding in findings if finding.level != "ok"}
