"""The fault table of results/faults.md:  python -m tests.faults.table [--seeds 1] [--mutations
                                          40000]
[--good 5000]        (make faults, which also keeps it in results/faults.json)

Server faults: behaviour x point x seed with two or three fake servers.  Payloads: random damage,
classified by an oracle. Exit status 1 where anything was lost, duplicated, hung, silently trained
on, wrongly refused, or not counted.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.faults.environments import POINTS as EPISODE_POINTS
from tests.faults.environments import TURNS
from tests.faults.episodes import POLICIES, episode_table, episode_trials, run_episode_trial
from tests.faults.payloads import damage_payloads, damage_samples, refuse_good
from tests.faults.trials import DEADLINE_SECONDS, all_trials, run_trial, table

VERDICTS = ("refused", "same", "gaps", "other", "wrong", "crash")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.table")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--mutations", type=int, default=40_000)
    parser.add_argument("--good", type=int, default=5_000)
    parser.add_argument("--jobs", type=int, default=4, help="trials at a time")
    arguments = parser.parse_args(argv)
    logging.getLogger("megatron_rl").setLevel(logging.ERROR)
    server_lines, server_ok = server_faults(arguments.seeds, arguments.jobs)
    turn_lines, turns_ok = server_faults(arguments.seeds, arguments.jobs, turns=2)
    episode_lines, episodes_ok = episode_faults(arguments.jobs)
    payload_lines, payload_ok = payload_faults(arguments.mutations, arguments.good)
    print("\n".join([*server_lines, "", *turn_lines, "", *episode_lines, "", *payload_lines]))
    return 0 if server_ok and turns_ok and episodes_ok and payload_ok else 1


def server_faults(num_seeds: int, jobs: int, turns: int = 1) -> tuple[list[str], bool]:
    trials = list(all_trials(num_seeds, turns))
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(run_trial, trials))
    broken = [outcome for outcome in outcomes if not outcome.is_as_expected]
    for outcome in broken:
        print(f"not as expected: {outcome}", file=sys.stderr)
    late = sum(outcome.seconds > outcome.deadline + 1 for outcome in outcomes)
    repeated = sum(outcome.deadline > DEADLINE_SECONDS for outcome in outcomes)
    behaviours, points = (
        len({getattr(trial, name) for trial in trials}) for name in ("behaviour", "point")
    )
    what = f"server faults in episodes of {turns} turns" if turns > 1 else "server faults"
    heading = (
        f"{len(trials)} {what}: {behaviours} behaviours x {points} points, seeds: {num_seeds}; as"
        f" expected {len(trials) - len(broken)}.  Calls over the deadline of {DEADLINE_SECONDS:g} s"
        f" + 1 s: {late}; with longer deadlines, because the machine was too slow: {repeated}."
    )
    return [*textwrap.wrap(heading, 100), "", *table(outcomes)], not broken


def episode_faults(jobs: int) -> tuple[list[str], bool]:
    trials = list(episode_trials())
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(run_episode_trial, trials))
    broken = [outcome for outcome in outcomes if not outcome.is_as_expected]
    for outcome in broken:
        print(f"UNEXPECTED: {outcome}", file=sys.stderr)
    behaviours = len({trial.behaviour for trial in trials})
    heading = (
        f"{len(trials)} faults of episodes of {TURNS} turns: {behaviours} behaviours x"
        f" {len(EPISODE_POINTS)} points, where they can be, environments in threads and in"
        f" processes, agent.on_error = {', '.join(POLICIES)}; as expected"
        f" {len(trials) - len(broken)}."
    )
    return [*textwrap.wrap(heading, 100), "", *episode_table(outcomes)], not broken


def payload_faults(mutations: int, good: int) -> tuple[list[str], bool]:
    """A quarter of the mutations are of whole samples, the rest of their routes."""
    started = time.process_time()
    verdicts: dict[str, Counter[str]] = damage_payloads(mutations - mutations // 4, seed=0)
    verdicts["whole sample"] = damage_samples(mutations // 4, seed=0)
    verdicts["all"] = sum(verdicts.values(), Counter())
    sound = refuse_good(good, seed=0)
    seconds = time.process_time() - started
    lines = [
        f"{mutations} payload mutations and {good} valid payloads ({seconds:.0f} s of CPU time); "
        f"false refusals {good - sound['same']} of {good}.",
        "",
        f"| damage | mutations | {' | '.join(VERDICTS)} |",
        "|---|---" + "|---" * len(VERDICTS) + "|",
    ]
    for kind, counts in verdicts.items():
        cells = [kind, counts.total(), *(counts[verdict] for verdict in VERDICTS)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    is_good = (
        not verdicts["all"]["wrong"] and not verdicts["all"]["crash"] and sound["same"] == good
    )
    return lines, is_good


if __name__ == "__main__":
    sys.exit(main())
