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
# masked-out tokens with log-prob 0, to conclude that the trainer writes 0 for them
LEAST_ZEROS = 20
LEAST_FRACTION = 0.9  # of the masked-out tokens that have log-prob 0, for the same


@dataclass(frozen=True)
class ForeignRollout(Dumped):
    """A sequence that another trainer saved."""

    loss_mask: np.ndarray | None = None
    """int [R]: 1 where a token carries loss."""
    weight_versions: Sequence[int] = ()
    """Versions of the calls that sampled it, in order."""
    has_logprobs: bool = True
    """False: the log-probs are zeros in place of none."""
    dense: int = 0
    """Leading layers that were left out, as their ids are 0 in every rollout of the file."""
    has_media: bool = False
    """With images or sound: its expert ids are not read."""


Read = Callable[[Path, list[Finding]], Iterator[ForeignRollout]]
"""One file -> its rollouts, and what is wrong with the file itself."""


@dataclass(frozen=True)
class ForeignDump:
    """The files of a dump, in order.

    text_only: they hold no token ids, so only the files themselves can be checked.
    """

    format: str
    files: tuple[Path, ...]
    read: Read
    notes: tuple[str, ...] = ()
    text_only: bool = False


def make_record(
    path: Path,
    index: int,
    step: int,
    tokens: np.ndarray,
    response_length: int,
    versions: Sequence[int] = (),
) -> RecordedRollout:
    """Return the line of rollout `index` of a file.

    How many tokens each version sampled is not in the dumps: all are counted for the last one.
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
    """Routes [rows, L, K] of the MoE layers: slime, miles and verl keep the rows of dense layers,
    as zeros.

    dense: leading layers to leave out where no model says which are dense.
    """
    if routes.ndim != 3:
        return routes
    if sizes is None:
        return routes[:, dense:]
    return routes[:, list(sizes.moe_layers)] if routes.shape[1] == sizes.num_layers else routes


def zero_layers(routes: np.ndarray) -> int:
    """The number of layers of [rows, L, K], from the first on, in which every id is 0; 0 where all
    layers are.
    """
    if routes.ndim != 3 or routes.shape[2] < 2 or not routes.any():
        return 0
    return int(routes.any((0, 2)).argmax())


@dataclass
class ForeignChecks:
    """Checks of masks and weight versions over the rollouts of a dump, which are added one by one."""

    rollouts: int = 0
    with_routes: int = 0
    with_logprobs: int = 0
    with_masks: int = 0
    with_versions: int = 0
    with_media: int = 0
    dense: int = 0
    out: int = 0  # masked-out tokens of rollouts with log-probs
    out_zero: dict[int, int] = field(default_factory=lambda: dict.fromkeys((-1, 0, 1), 0))
    sampled: list[tuple[str, int, int]] = field(default_factory=list)
    """Rollout, masked-out tokens with log-prob, first."""
    seen: list[Finding] = field(default_factory=list)

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
            self.seen.append(
                Finding("versions", where, text, "its parts were joined in the wrong order")
            )
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
        """Count how many masked-out tokens have log-prob 0, and how many would if the mask began
        `shift` tokens later.
        """
        out = np.flatnonzero(~carries)
        self.out += len(out)
        for shift in self.out_zero:
            places = out + shift
            places = places[(places >= 0) & (places < len(zero))]
            self.out_zero[shift] += int(zero[places].sum())
        sampled = out[~zero[out]]
        if len(sampled):
            self.sampled.append((where, len(sampled), int(sampled[0])))

    def findings(self) -> Iterator[Finding]:
        """Environment tokens have log-prob 0, so no shift of a correct mask covers more zeros than
        the mask itself does.
        """
        yield from self.seen
        best = max(self.out_zero, key=lambda shift: (self.out_zero[shift], shift == 0))
        if (
            best
            and self.out_zero[best] >= LEAST_ZEROS
            and self.out_zero[best] >= LEAST_FRACTION * self.out
        ):
            zeros = f"{self.out_zero[0]} have log-prob 0, {self.out_zero[best]} at shift {best:+d}"
            text = f"of {self.out} masked-out tokens {zeros}"
            cause = (
                f"shifted by one: entry j is that of response token j {'+' if best > 0 else '-'} 1"
            )
            yield Finding("loss_mask", "dump", text, cause)
        elif self.out_zero[0] >= LEAST_ZEROS and self.out_zero[0] >= LEAST_FRACTION * self.out:
            for where, count, first in self.sampled:
                text = (
                    f"{count} masked-out tokens have a log-prob, first response token {first};"
                    " others have 0"
                )
                yield Finding(
                    "loss_mask",
                    where,
                    text,
                    "sampled tokens carry no loss: the mask is of another rollout",
                )

    def unchecked(self, *, text_only: bool) -> dict[str, str]:
        """Checks that the content of no rollout allows, and why."""
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
