"""Rollouts that another trainer saved: the record that every format is read into, and the checks
that only these need.

The formats are in slime_dumps.py (slime, miles) and verl_dumps.py.  A mask of the response is 1
where a token carries loss; tokens that an environment wrote have mask 0, and these trainers record
0 as their log-prob.
Shapes: S tokens of a rollout, R of them response, L MoE layers, K top-k; routes [S - 1, L, K], mask
and log-probs [R].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding, RecordedRollout
from megatron_rl_tools.check_rollouts.model_sizes import Sizes
from megatron_rl_tools.check_rollouts.rollout_checks import CHECKS

ROUTE_CHECKS = ("shape", "range", "dtype", "zero", "duplicate", "stuck", "copied", "alignment")
TOKEN_CHECKS = ("length", "logprobs", *ROUTE_CHECKS, "versions", "loss_mask")
FOREIGN_CHECKS = (*CHECKS, "loss_mask")
OURS_ALONE = {
    "turns": "the format does not mark turns",
    "digest": "only rollouts of megatron-rl have a digest",
    "episode": "only rollouts of megatron-rl have a digest",
    "mask": "kept sets (top-p, top-k) of other trainers are not read",
}
LEAST_ZEROS = 20
"""Masked-out tokens with log-prob 0 from which it follows that the trainer writes 0 for them."""
LEAST_FRACTION = 0.9
"""Fraction of the masked-out tokens that must have log-prob 0 for the same conclusion."""


@dataclass(frozen=True)
class ForeignRollout(Dumped):
    """A sequence that another trainer saved."""

    loss_mask: np.ndarray | None = None
    """1 where a token carries loss, int [R]."""
    weight_versions: Sequence[int] = ()
    """Weight versions of the calls that sampled it, in order."""
    has_logprobs: bool = True
    """False if the dump has no log-probs: then they are zeros."""
    dense: int = 0
    """Leading layers that were left out, because their ids are 0 in every rollout of the file."""
    has_media: bool = False
    """True for rollouts with images or sound, whose expert ids are not read."""


Read = Callable[[Path, list[Finding]], Iterator[ForeignRollout]]
"""Yields the rollouts of a file, and adds findings about the file itself."""


@dataclass(frozen=True)
class ForeignDump:
    """The files of a dump, in order."""

    format: str
    files: tuple[Path, ...]
    read: Read
    notes: tuple[str, ...] = ()
    text_only: bool = False
    """The files have no token ids: only the files themselves can be checked."""


def make_record(
    path: Path,
    index: int,
    step: int,
    tokens: np.ndarray,
    response_length: int,
    versions: Sequence[int] = (),
) -> RecordedRollout:
    """Return the line of rollout `index` of a file.

    The dumps do not say how many tokens each version sampled: all are counted for the last one.
    """
    *others, last = versions or [0]
    spans = [*([version, 0] for version in others), [last, response_length]]
    lengths = len(tokens) - response_length, response_length
    return RecordedRollout(
        step, f"{path.name}#{index}", "", "", "", "", None, None, *lengths, "", spans
    )


def or_zeros(logprobs: np.ndarray | None, response_length: int) -> np.ndarray:
    return np.zeros(max(0, response_length), np.float32) if logprobs is None else logprobs


def without_dense(routes: np.ndarray, sizes: Sizes | None, dense: int) -> np.ndarray:
    """Return the routes [rows, L, K] of the MoE layers: slime, miles and verl keep dense layers, as
    zeros.

    dense: number of leading layers to leave out if no model says which are dense.
    """
    if routes.ndim != 3:
        return routes
    if sizes is None:
        return routes[:, dense:]
    return routes[:, list(sizes.moe_layers)] if routes.shape[1] == sizes.num_layers else routes


def zero_layers(routes: np.ndarray) -> int:
    """Return the number of leading layers of [rows, L, K] in which every id is 0; 0 if all are
    0.
    """
    if routes.ndim != 3 or routes.shape[2] < 2 or not routes.any():
        return 0
    return int(routes.any((0, 2)).argmax())


@dataclass
class ForeignChecks:
    """Checks of masks and weight versions over a dump, whose rollouts are added one by one."""

    rollouts: int = 0
    with_routes: int = 0
    with_logprobs: int = 0
    with_masks: int = 0
    with_versions: int = 0
    with_media: int = 0
    dense: int = 0
    out: int = 0
    """Masked-out tokens of rollouts with log-probs."""
    out_zero: dict[int, int] = field(default_factory=lambda: dict.fromkeys((-1, 0, 1), 0))
    """Shift -> masked-out tokens with log-prob 0, with the mask shifted by as many tokens."""
    sampled: list[tuple[str, int, int]] = field(default_factory=list)
    """(rollout, number of masked-out tokens with a log-prob, the first of them)."""
    seen: list[Finding] = field(default_factory=list)
    """Findings about single rollouts."""

    def add(self, rollout: ForeignRollout) -> None:
        where = f"step {rollout.record.step} {rollout.record.id}"
        self.rollouts += 1
        self.with_media += rollout.has_media
        self.dense = max(self.dense, rollout.dense)
        self.with_routes += rollout.routes is not None
        self.with_logprobs += rollout.has_logprobs
        self.with_masks += rollout.loss_mask is not None
        self.with_versions += bool(rollout.weight_versions)
        if any(after < before for before, after in pairwise(rollout.weight_versions)):
            text = f"weight versions {list(rollout.weight_versions)}, must not decrease"
            cause = "its parts were joined in the wrong order"
            self.seen.append(Finding("versions", where, text, cause))
        mask = rollout.loss_mask
        if mask is not None and not self._reject(where, rollout, mask) and rollout.has_logprobs:
            self._compare(where, mask != 0, rollout.logprobs == 0)

    def _reject(self, where: str, rollout: ForeignRollout, mask: np.ndarray) -> bool:
        size, tokens = rollout.record.response_length, len(rollout.tokens)
        if len(mask) != size:
            causes = {
                tokens: "a mask of all tokens: the prompt's part was kept",
                tokens - 1: "a mask of predictions",
            }
            cause = causes.get(len(mask), "tokens were added or cut without their mask")
            text = f"{len(mask)} entries for {size} response tokens"
            self.seen.append(Finding("loss_mask", where, text, cause))
            return True
        if (bad := (mask != 0) & (mask != 1)).any():
            text = f"entry {int(bad.argmax())} is {mask[bad][0]}, must be 0 or 1"
            self.seen.append(Finding("loss_mask", where, text, "weights in place of a mask"))
            return True
        return len(rollout.logprobs) != size  # named by the check of lengths

    def _compare(self, where: str, carries: np.ndarray, zero: np.ndarray) -> None:
        """Count the masked-out tokens with log-prob 0, as they are and with the mask shifted."""
        out = np.flatnonzero(~carries)
        self.out += len(out)
        # a mask that is shifted by one covers a zero less at one border of every span
        for shift in self.out_zero:
            places = out + shift
            places = places[(places >= 0) & (places < len(zero))]
            self.out_zero[shift] += int(zero[places].sum())
        sampled = out[~zero[out]]
        if len(sampled):
            self.sampled.append((where, len(sampled), int(sampled[0])))

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about the dump.

        Environment tokens have log-prob 0, so no shift of a correct mask covers more zeros than the
        mask itself.
        """
        yield from self.seen
        zeros, least = self.out_zero, max(LEAST_ZEROS, LEAST_FRACTION * self.out)
        best = max(zeros, key=lambda shift: (zeros[shift], shift == 0))
        if best and zeros[best] >= least:
            counts = f"{zeros[0]} have log-prob 0, {zeros[best]} at shift {best:+d}"
            sign = "+" if best > 0 else "-"
            cause = f"shifted by one: entry j is that of response token j {sign} 1"
            text = f"of {self.out} masked-out tokens {counts}"
            yield Finding("loss_mask", "dump", text, cause)
        elif zeros[0] >= least:
            for where, count, first in self.sampled:
                text = (
                    f"{count} masked-out tokens have a log-prob, first response token {first};"
                    " others have 0"
                )
                cause = "sampled tokens carry no loss: the mask is of another rollout"
                yield Finding("loss_mask", where, text, cause)

    def unchecked(self, *, text_only: bool) -> dict[str, str]:
        """Return check -> reason for the checks that the content of no rollout allows."""
        reasons: dict[str, str] = {}
        if not self.with_routes:
            reasons |= dict.fromkeys(ROUTE_CHECKS, "the dump has no expert ids")
        if not self.with_logprobs:
            reasons["logprobs"] = "the dump has no log-probs of the rollout"
        if not self.with_masks:
            reasons["loss_mask"] = "the dump has no mask"
        if not self.with_versions:
            reasons["versions"] = "the dump has no weight versions"
        if text_only:
            reasons |= dict.fromkeys(TOKEN_CHECKS, "the files hold text only, no token ids")
        return reasons | OURS_ALONE

    def notes(self) -> Iterator[str]:
        if self.with_media:
            yield (
                f"{self.with_media} rollouts have images or sound: their rows are not tokens,"
                " expert ids are not checked"
            )
        if self.dense:
            yield (
                f"the first {self.dense} layers are 0 in every rollout and taken as dense; --model"
                " checks it"
            )
        if self.with_masks and not self.with_logprobs:
            yield (
                "loss_mask: lengths and values only; which tokens were sampled is not known without"
                " log-probs"
            )
        elif self.out and self.out_zero[0] < LEAST_ZEROS:
            zeros = f"{self.out_zero[0]} of {self.out} masked-out tokens have log-prob 0"
            yield f"loss_mask: {zeros}, too few to check its borders"
        elif self.with_masks and not self.out:
            yield "loss_mask: no token is masked out, there are no borders to check"
        if self.with_versions:
            yield (
                "versions: their order within a rollout only; the dump does not say what staleness"
                " is allowed"
            )
