"""The fewest tokens that must change replica for the balance that our plan reaches, beside ours.

    OMP_NUM_THREADS=1 python benchmarks/least_moves.py [--seconds 60] [--seeds 3] [--replicas 32 \
1024]

Lengths as in benchmarks/balance.py.  Needs scipy (HiGHS).

    exact     4 replicas of 8 sequences: the fewest tokens of any plan with our number of slots,
              under the cap, whose slots cost no more in sum than ours (an integer program): the
              best found within --seconds, and what is proven of it
    surplus   a bound for any number of replicas: a replica whose own sequences cost more than that
              sum sends the surplus away, of its longest sequences, cut where needed (fewest tokens
              for the cost); and the same for pods
    by work   the plan where pods get equal work only, not the same number and mix of lengths
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.balance import BALANCE_LENGTH, CAP, draw, ours
from megatron_rl.batch import assignment
from megatron_rl.batch.assignment import Plan, plan_of, pod_size
from megatron_rl.batch.balance import Work

SMALL, EACH = 4, 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", nargs="+", type=int, default=[32, 1024])
    args = parser.parse_args()
    for kind in ("lognormal", "capped"):
        for seed in range(args.seeds):
            lengths = np.array(draw(kind, seed, SMALL)[: SMALL * EACH])
            plan = plan_of(ours(lengths.tolist(), SMALL)[0])
            best, proven = exact(plan, lengths, args.seconds)
            print(
                f"{kind}, {SMALL} replicas, seed {seed}: {shown(plan, lengths)}; least {best:.3f},"
                f" proven {proven:.3f}"
            )
        for replicas in args.replicas:
            lengths = np.array(draw(kind, 0, replicas))
            plan = plan_of(ours(lengths.tolist(), replicas)[0])
            bounds = ", ".join(
                f"{surplus(plan, lengths, size):.3f}" for size in (1, pod_size(replicas))
            )
            print(
                f"{kind}, {replicas} replicas: {shown(plan, lengths)}; surplus of replicas, of"
                f" pods: {bounds}"
            )
            if pod_size(replicas) < replicas:
                with patch.object(assignment, "assign_pods", deal_by_work):
                    print(
                        "    by work:"
                        f" {shown(plan_of(ours(lengths.tolist(), replicas)[0]), lengths)}"
                    )
    return 0


def shown(plan: Plan, lengths: np.ndarray) -> str:
    home = owners(plan, lengths)
    there, size = plan.places % plan.replicas, pod_size(plan.replicas)
    moved, pods = (
        lengths[away].sum() / lengths.sum()
        for away in (there != home, there // size != home // size)
    )
    lockstep = plan.lockstep_efficiency(Work(lengths, CAP, BALANCE_LENGTH))
    return f"lockstep {lockstep:.3f}, moved {moved:.3f}, to another pod {pods:.3f}"


def owners(plan: Plan, lengths: np.ndarray) -> np.ndarray:
    return np.arange(len(lengths)) * plan.replicas // len(lengths)


def cost(lengths: np.ndarray) -> np.ndarray:
    return lengths * (BALANCE_LENGTH + lengths.astype(float)) / 1e6


def in_sum(plan: Plan, lengths: np.ndarray) -> float:
    """Return the cost of the costliest micro-batch, summed over the slots."""
    costs = np.bincount(plan.places, cost(lengths), plan.num_slots * plan.replicas)
    return float(costs.reshape(-1, plan.replicas).max(1).sum())


def surplus(plan: Plan, lengths: np.ndarray, size: int) -> float:
    """Return the surplus of each pod.  size: replicas that share their sequences."""
    group, tokens = owners(plan, lengths) // size, 0.0
    for pod in range(group.max() + 1):
        members = np.sort(lengths[group == pod])[::-1]
        costs = cost(members)
        over = costs.sum() - in_sum(plan, lengths) * size
        # of each sequence, the longest first
        sent = np.clip((over - (np.cumsum(costs) - costs)) / costs, 0, 1)
        tokens += float((sent * members).sum())
    return tokens / lengths.sum()


def deal_by_work(work: Work, pod_of_owner: np.ndarray, pods: int, size: int) -> np.ndarray:
    """Return a pod for each sequence: a pod above the mean gives its longest sequences that fit the
    surplus, one by one, to the cheapest pod.
    """
    rows = np.asarray(work.rows, np.int64)
    costs = rows * (work.balance_length + rows)
    pod_of, moved = pod_of_owner.copy(), list[int]()
    spent = np.bincount(pod_of, costs, pods).astype(np.int64)
    mean = spent.sum() // pods
    for pod in np.flatnonzero(spent > mean):
        members = np.flatnonzero(pod_of == pod)
        for i in members[np.argsort(-rows[members], kind="stable")].tolist():
            if costs[i] <= spent[pod] - mean:
                spent[pod] -= costs[i]
                moved.append(i)
    for i in sorted(moved, key=lambda i: -rows[i]):
        pod_of[i] = np.argmin(spent)
        spent[pod_of[i]] += costs[i]
    return pod_of


def exact(plan: Plan, lengths: np.ndarray, seconds: float) -> tuple[float, float]:
    """Solve exactly.  Variables: whether sequence i is in place p (slot x R + replica), and the
    cost of each slot.
    """
    places, slots, count = plan.num_slots * plan.replicas, plan.num_slots, len(lengths)
    size = count * places + slots
    once, fits, limits = (lil_matrix((rows, size)) for rows in (count, 2 * places, 1))
    for i in range(count):
        once[i, i * places : (i + 1) * places] = 1
    for place in range(places):
        fits[2 * place, place : count * places : places] = lengths
        fits[2 * place + 1, place : count * places : places] = cost(lengths)
        fits[2 * place + 1, count * places + place // plan.replicas] = -1
    limits[0, count * places :] = 1
    away = np.arange(places)[None] % plan.replicas != owners(plan, lengths)[:, None]
    solution = milp(
        np.concatenate([(away * lengths[:, None]).ravel(), np.zeros(slots)]),
        constraints=[
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(fits.tocsr(), -np.inf, np.tile([CAP, 0], places)),
            LinearConstraint(limits.tocsr(), -np.inf, in_sum(plan, lengths) * (1 + 1e-9)),
        ],
        bounds=Bounds(0, np.append(np.ones(count * places), np.full(slots, np.inf))),
        integrality=np.append(np.ones(count * places), np.zeros(slots)),
        options={"time_limit": seconds},
    )
    best = np.nan if solution.fun is None else solution.fun
    return best / lengths.sum(), (solution.mip_dual_bound or 0) / lengths.sum()


if __name__ == "__main__":
    sys.exit(main())
