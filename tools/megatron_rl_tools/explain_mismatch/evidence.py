"""Evidence: what was measured, as numbers and texts under names that the rules (verdicts.py) read.

KL is k3, the mean over sampled tokens of exp(d) - 1 - d with d = log pi - log mu, in nats: never
negative, 0 only where equal.
Shapes: R sampled tokens, S tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.records import Rollout
from megatron_rl_tools.explain_mismatch.trainer_side import Half

Value = float | str
LONGEST_SHIFT = 2
MOST_NATS = 20.0
"""A log-ratio counts as at most this: exp of a wrong model's would say nothing."""


class Evidence(dict[str, Value]):
    """Name -> number (booleans are 0 and 1) or text.

    A rule that reads a name that is not here does not hold.
    """

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return float(value) if isinstance(value, int | float) else None

    def add(self, prefix: str, **values: Value | None) -> None:
        """PREFIX.NAME for each value that is known."""
        self.update(
            {f"{prefix}.{name}": value for name, value in values.items() if value is not None}
        )


def kl(mu: Sequence[np.ndarray], pi: Sequence[np.ndarray]) -> float:
    """k3 of KL(mu, pi) over the sampled tokens of all sequences, nats."""
    d = np.concatenate([p.astype(np.float64) - m for m, p in zip(mu, pi, strict=True)]).clip(
        -MOST_NATS, MOST_NATS
    )
    return float(np.mean(np.expm1(d) - d))


def difference(mu: Sequence[np.ndarray], pi: Sequence[np.ndarray]) -> float:
    """Mean of |log mu - log pi|, nats."""
    return float(
        np.mean(
            np.abs(np.concatenate([m.astype(np.float64) - p for m, p in zip(mu, pi, strict=True)]))
        )
    )


def overlap(served: np.ndarray, own: np.ndarray) -> float:
    """Mean over rows and layers of the share of K experts in both; served, own [N, L, K]."""
    return float((served.astype(np.int64)[..., :, None] == own[..., None, :]).any(-1).mean())


def flips(served: np.ndarray, own: np.ndarray) -> np.ndarray:
    """bool [N, L]: the sets differ."""
    return ~(served.astype(np.int64)[..., :, None] == own[..., None, :]).any(-1).all(-1)


def shifted_overlap(served: np.ndarray, own: np.ndarray, shift: int) -> float:
    """Of served row j + shift with the trainer's row j."""
    rows = slice(max(0, -shift), len(own) - max(0, shift))
    moved = slice(max(0, shift), len(own) - max(0, -shift))
    return overlap(served[moved], own[rows])


def route_evidence(rollouts: Sequence[Rollout], halves: Sequence[Half]) -> Evidence:
    """Do the server's routes belong to these rows, layers and sequences?

    halves: the trainer's own choice, live.
    """
    found = Evidence()
    pairs = [
        (rollout.routed_experts, half.routes)
        for rollout, half in zip(rollouts, halves, strict=True)
    ]
    known = [(served, own) for served, own in pairs if served is not None and own.shape[1]]
    if not known:
        return found

    def mean(score: list[float]) -> float:
        return float(np.average(score, weights=[len(own) for _, own in known]))

    def best(scores: dict[int, float]) -> int:
        """0 unless a shift removes at least half of the disagreement."""
        top = max(scores, key=lambda key: scores[key])
        return top if scores[top] - scores[0] > 0.5 * (1 - scores[0]) and scores[top] > 0.5 else 0

    by_row = {
        shift: mean([shifted_overlap(*pair, shift) for pair in known])
        for shift in range(-LONGEST_SHIFT, LONGEST_SHIFT + 1)
    }
    num_layers = known[0][1].shape[1]
    by_layer = {
        shift: mean([overlap(np.roll(served, -shift, axis=1), own) for served, own in known])
        for shift in range(min(num_layers, 4))
    }
    found.add(
        "routes", overlap=by_row[0], row_shift=best(by_row), row_offset=-best(by_row),
        row_shift_overlap=max(by_row.values()),
        layer_shift=best(by_layer), layer_shift_overlap=max(by_layer.values()),
    )  # fmt: skip
    others = [
        overlap(other[:size], own[:size])
        for number, (_, own) in enumerate(known)
        for at, (other, _) in enumerate(known)
        if at != number and (size := min(len(own), len(other)))
    ]
    partners = [
        max(
            (
                overlap(other[: len(own)], own[: len(other)])
                for at, (other, _) in enumerate(known)
                if at != number
            ),
            default=0.0,
        )
        for number, (_, own) in enumerate(known)
    ]
    own_overlap = [overlap(served, own) for served, own in known]
    foreign = [p > o + 0.2 and p > 0.8 for p, o in zip(partners, own_overlap, strict=True)]
    found.add(
        "routes",
        foreign=float(np.mean(foreign)),
        others_overlap=float(np.mean(others)) if others else None,
    )
    return found


def logprob_evidence(rollouts: Sequence[Rollout], halves: Sequence[Half]) -> Evidence:
    """Do the server's log-probs belong to these tokens?"""
    found = Evidence()
    scores = {}
    for shift in range(-LONGEST_SHIFT, LONGEST_SHIFT + 1):
        mine = [
            half.logprobs[max(0, -shift) : len(half.logprobs) - max(0, shift)] for half in halves
        ]
        theirs = [
            r.rollout_logprobs[max(0, shift) : len(r.rollout_logprobs) - max(0, -shift)]
            for r in rollouts
        ]
        if min(map(len, mine)) > 0:
            scores[shift] = difference(theirs, mine), kl(theirs, mine)
    top = min(scores, key=lambda key: scores[key][0])
    shift = top if scores[top][0] < 0.3 * scores[0][0] else 0
    found.add("logprobs", shift=shift, offset=-shift, shift_diff=scores[top][0])
    found.add("kl", logprobs_shifted=scores[top][1])
    return found


def flip_evidence(
    rollouts: Sequence[Rollout], halves: Sequence[Half], *, num_layers: int
) -> tuple[Evidence, list[dict[str, float]]]:
    """Where routers choose otherwise although the layers below had the same routes; and a table by
    layer.

    A flip whose gap is above a tenth of the usual margin is clear: rounding does not explain it.
    """
    found, table = Evidence(), list[dict[str, float]]()
    known = [
        (rollout.routed_experts, half)
        for rollout, half in zip(rollouts, halves, strict=True)
        if rollout.routed_experts is not None and half.routes.shape[1]
    ]
    for layer in range(num_layers if known else 0):
        flipped = np.concatenate([flips(served, half.routes)[:, layer] for served, half in known])
        gap, margin = (
            np.concatenate([getattr(h, name)[:, layer] for _, h in known])
            for name in ("gap", "margin")
        )
        usual = float(np.median(margin))
        clear = flipped & (gap > 0.1 * usual)
        table.append(
            {
                "layer": layer,
                "flips": float(flipped.mean()),
                "clear": float(clear.mean()),
                "gap": float(gap.max()),
                "margin": usual,
            }
        )
    first = next((row for row in table if row["clear"] > 0), None)
    if table:
        found.add(
            "flips",
            share=float(np.mean([row["flips"] for row in table])),
            clear=float(np.mean([row["clear"] for row in table])),
        )
    if first is not None:
        found.add(
            "flips",
            first_layer=first["layer"],
            first_gap=first["gap"],
            first_margin=first["margin"],
        )
    return found, table


def position_evidence(
    rollouts: Sequence[Rollout], halves: Sequence[Half], borders: Sequence[int]
) -> Evidence:
    """Does the difference grow with the position, or sit at the borders of pages and chunks?"""
    places = np.concatenate([r.sampled - 1 for r in rollouts])
    sizes = np.abs(
        np.concatenate(
            [r.rollout_logprobs - h.logprobs for r, h in zip(rollouts, halves, strict=True)]
        )
    )
    found = Evidence()
    early, late = places <= np.quantile(places, 0.3), places >= np.quantile(places, 0.7)
    if early.any() and late.any() and sizes[early].mean() > 0:
        found.add("position", growth=float(sizes[late].mean() / sizes[early].mean()))
    for border in borders:
        at = places % border == 0
        if border > 1 and at.any() and not at.all() and sizes[~at].mean() > 0:
            found.add(
                "position", **{f"border_{border}": float(sizes[at].mean() / sizes[~at].mean())}
            )
    return found
