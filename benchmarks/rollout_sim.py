"""Simulated: how long the trainer waits for rollouts under every setting of the scheduler, and
under slime's and verl's rules.

    python -m benchmarks.rollout_sim [--steps 60] [--seed 0] [--servers 8 16 32] [--slots 128] \
[--k 0 1 2 4 8] [--over]

A discrete-event simulation; no server, no model, nothing measured.  Servers and workload:
sampling_model.py.  Our rows run the trainer's own Scheduler on the simulated clock
(sampling_modes.py), the peers' rows are their rules (sampling_peers.py).  A synchronous step on 8
servers x 128 slots spends 80 % of its time without the weight sync on sampling (--update-share).

    idle       share of the time in which the trainer waits for responses, as it does where a weight
               sync drains
    bound      least idle share that these servers and this k allow, from the mean of all prompts,
               and what limits it: the steps that are counted have other prompts, so that a line may
               be a point below it
    of ideal   speed / the speed at the bound
    all steps  the idle share with the first and last sixth of the steps, in which queues fill and
               empty

Every run checks that each prompt is trained on once, is waiting, or was dropped by over_sample, and
that no token is too old.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.sampling_model import Record, Speed, Workload, bound
from benchmarks.sampling_modes import Settings, simulate, with_update_share
from benchmarks.sampling_peers import Slime, Verl

OVER = {  # rollout.over_sample, and what the paper's synchronous steps gain from it
    "synchronous": {},
    "over_sample 0.5, drop": {"over_sample": 0.5},
    "over_sample 0.5, resume": {"over_sample": 0.5, "partial": "resume", "max_staleness": 1},
    "max_staleness 1, drain": {"max_staleness": 1},
    "over_sample 0.5, resume, max_staleness 2, abort": {
        "over_sample": 0.5, "partial": "resume", "max_staleness": 2, "weight_update": "abort",
    },
}  # fmt: skip
UPDATES = "drain", "abort", "in_place"


def ours(k: int) -> Iterator[tuple[str, Settings]]:
    if k == 0:
        yield "synchronous", {}
        return
    for update in UPDATES:
        yield f"k = {k}, {update}", {"max_staleness": k, "weight_update": update}


def peers(workload: Workload, speed: Speed) -> Iterator[tuple[str, Record]]:
    """Return slime with its default and with one response per slot; verl's default, its README's
    recommendation, and above.
    """
    for concurrency in (512, speed.slots):
        yield (
            f"slime, concurrency {concurrency}",
            Slime(workload, speed, concurrency=concurrency).run(),
        )
    for threshold in (0.1, 0.5, 1.0, 4.0, 8.0):
        yield f"verl, threshold {threshold:g}", Verl(workload, speed, threshold=threshold).run()


def row(name: str, record: Record, base: Record, limit: str = "", ideal: str = "") -> str:
    cells = [
        name, f"{record.idle_share:.1%}", limit,
        f"{record.tokens_per_second / base.tokens_per_second:.2f}", ideal, record.stale,
        f"{record.mean_age:.2f}", record.age_quantile(0.95), max(record.ages),
        f"{record.all_idle_share:.1%}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument(
        "--alike",
        type=float,
        default=0.5,
        help="small: responses of a prompt share the cap; 1000: do not",
    )
    parser.add_argument("--update-share", type=float, default=0.2)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument(
        "--slots", type=int, default=128, help="of each server (rollout.max_running_requests)"
    )
    parser.add_argument(
        "--prefill", type=float, default=2e-5, help="seconds of a token that is computed again"
    )
    parser.add_argument(
        "--k", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="rollout.max_staleness"
    )
    parser.add_argument("--over", action="store_true", help="over_sample instead")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args(argv)
    speed = Speed(slots=args.slots, prefill=args.prefill)
    workload = Workload(
        prompts=args.prompts, group=args.group, steps=args.steps, seed=args.seed, alike=args.alike
    )
    workload = with_update_share(workload, Speed(), args.update_share)
    base = simulate(workload, Speed(), {})
    update = workload.step_tokens * workload.update
    print(
        f"{workload.step_tokens:,.0f} tokens a step; update {update:.1f} s, weight sync"
        f" {workload.sync:g} s"
    )
    for servers in args.servers:
        table(workload, replace(speed, servers=servers), base, args)
    return 0


def table(workload: Workload, speed: Speed, base: Record, args: argparse.Namespace) -> None:
    seconds = workload.step_tokens / speed.tokens_per_second
    print(
        f"\n{speed.servers} servers x {speed.slots} slots: a step's tokens take {seconds:.1f} s"
        " with every slot taken\n"
    )
    print(
        "| simulated | idle | bound, limit | speed | of ideal | too old | mean age | 95 % | max |"
        " all steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    if args.over:
        for name, settings in OVER.items():
            print(row(name, simulate(workload, speed, settings), base), flush=True)
        return
    for k in args.k:
        for name, settings in ours(k):
            record = simulate(workload, speed, settings)
            least = bound(workload, speed, k, drains="drain" in name)
            ideal = record.tokens_per_second * least.seconds / workload.step_tokens
            print(
                row(name, record, base, f"{least.idle_share:.1%} {least.limit}", f"{ideal:.0%}"),
                flush=True,
            )
    if not args.no_peers:
        for name, record in peers(workload, speed):
            print(row(name, record, base), flush=True)


if __name__ == "__main__":
    sys.exit(main())
