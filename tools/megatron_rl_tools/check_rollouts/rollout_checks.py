"""The checks of saved rollouts that run no model (check_rollouts.py).

Shapes: S tokens of a rollout, R of them response, L MoE layers, K top-k, E experts; routes [S - 1,
L, K].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from megatron_rl_tools.check_rollouts.digests import digest_of_episode, digest_of_routes
from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding, Problems
from megatron_rl_tools.check_rollouts.length_checks import check_token_counts, check_turns
from megatron_rl_tools.check_rollouts.mask_checks import check_kept_sets
from megatron_rl_tools.check_rollouts.model_sizes import Sizes
from megatron_rl_tools.check_rollouts.rollout_copies import Copies

CHECKS: tuple[str, ...] = (
    "files", "length", "turns", "shape", "digest", "episode", "logprobs", "range",
    "dtype", "zero", "duplicate", "stuck", "copied", "alignment", "versions", "mask",
)  # fmt: skip
STUCK_ROWS = 4
"""Consecutive equal rows, of more than one token, from which their chance is computed."""
LEAST_CHANCE = 1e-12
"""A run of equal rows that is less likely (chance_of_run) is an error.

It is low enough for the error of the assumption that layers are independent, and far above the
chance in a model of dozens of layers.  Models of a few layers do repeat rows."""
LEAST_IDS = 1000
"""Expert ids from which the largest one means anything."""
COMMON_TOKENS = 1 << 14
"""Token ids below this are used for alignment: a tokenizer's low ids are the most frequent."""
CLEARLY_BETTER = 1.1
"""A shift is wrong where another one has this many times the agreement.  Rows of a repeated token
agree at every shift."""
HIGHEST_ID = (1 << 16) - 1
"""The largest expert id of any model; larger ones are bytes read as another type."""
LEAST_PAIRS = 300
"""Pairs of rows with the same token from which the alignment means anything."""


def check_one(dumped: Dumped, sizes: Sizes | None) -> Iterator[Finding]:
    """Check a rollout alone."""
    where = f"step {dumped.record.step} {dumped.record.id}"
    vocab_size = None if sizes is None else sizes.vocab_size
    problems = chain(
        check_token_counts(dumped),
        check_turns(dumped),
        check_logprobs(dumped),
        check_kept_sets(dumped, vocab_size),
        check_expert_ids(dumped, sizes),
    )
    for check, text, cause in problems:
        yield Finding(check, where, text, cause)


def check_expert_ids(dumped: Dumped, sizes: Sizes | None) -> Problems:
    routes = dumped.routes
    if routes is None:
        return
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        rule = "must be integers [rows, MoE layers, top-k]"
        text = f"expert ids are {routes.dtype} {list(routes.shape)}, {rule}"
        yield "shape", text, "another format"
        return
    yield from check_shape(routes, sizes)
    yield from check_missing(dumped, routes)
    yield from check_routes_digest(dumped, routes)
    yield from check_ids(routes, sizes, dumped.present)
    yield from check_stuck(dumped, routes)


def check_episode_digest(dumps: Sequence[Dumped]) -> Iterator[Finding]:
    """Check that these are the sequences of the episode that the last one ends."""
    last = dumps[-1]
    if len(dumps) == 1 and last.episode_digest is None:
        return
    recorded = "none" if last.episode_digest is None else last.episode_digest.hex()
    if (digest := digest_of_episode(dumps).hex()) != recorded:
        where = f"step {last.record.step} {last.record.id}"
        text = f"its {len(dumps)} sequences give {digest}, recorded is {recorded}"
        cause = "a sequence was lost, swapped or repeated, or its prompt ends elsewhere"
        yield Finding("episode", where, text, f"{cause}: tokens are learned from twice or never")


def check_logprobs(dumped: Dumped) -> Problems:
    bad = ~(np.isfinite(dumped.logprobs) & (dumped.logprobs <= 1e-3))
    if bad.any():
        at = int(bad.argmax())
        value = f"log mu of response token {at} is {dumped.logprobs[at]}"
        yield "logprobs", f"{value}, must be finite and <= 0", "numerics"


def check_shape(routes: np.ndarray, sizes: Sizes | None) -> Problems:
    if sizes is None:
        return
    layers, top_k = routes.shape[1:]
    expected = (len(sizes.moe_layers), sizes.top_k)
    if (layers, top_k) == expected:
        return
    if layers == sizes.num_layers and top_k == sizes.top_k:
        cause = "dense layers are in the layer axis: keep the MoE layers only"
    elif (top_k, layers) == expected:
        cause = "layer and top-k axes are swapped"
    elif layers * top_k == expected[0] * expected[1]:
        cause = (
            "the payload was reshaped with another number of layers and top-k: another model's"
            " configuration"
        )
    else:
        cause = "another model"
    model = f"the model has {expected[0]} MoE layers x top-{expected[1]}"
    yield "shape", f"{layers} layers x top-{top_k}, {model}", cause


def check_missing(dumped: Dumped, routes: np.ndarray) -> Problems:
    missing = dumped.missing
    if missing is not None and (missing.dtype != bool or missing.shape != (len(routes),)):
        value = f"rows without a route are {missing.dtype} {list(missing.shape)}"
        cause = "rows were removed or added after they were recorded"
        yield "shape", f"{value}, must be bool [{len(routes)}]", cause


def check_routes_digest(dumped: Dumped, routes: np.ndarray) -> Problems:
    """Check that the routes still belong to the tokens, with the digest that was computed when the
    payload was decoded.
    """
    if dumped.digest is None:
        rule = "none recorded, must be one per rollout with expert ids"
        yield "digest", rule, "saved by an older version, or edited"
    elif dumped.digest != (digest := digest_of_routes(dumped.tokens, routes, dumped.environment)):
        text = f"tokens and expert ids give {digest.hex()}, recorded is {dumped.digest.hex()}"
        cause = "routes of another rollout, or tokens or rows edited or truncated after sampling"
        yield "digest", text, cause


def check_ids(routes: np.ndarray, sizes: Sizes | None, present: np.ndarray) -> Problems:
    """Check the range of ids, then all-zero rows, then other duplicates; a row fails only one.

    Rows that are recorded as without a route are skipped.
    """
    high = None if sizes is None else sizes.num_experts
    outside = (routes < 0) | (routes > HIGHEST_ID if high is None else routes >= high)
    outside &= present[:, None, None]
    if outside.any():
        row, layer, slot = np.unravel_index(outside.argmax(), routes.shape)
        value = int(routes[row, layer, slot])
        rule = f"0 <= id <= {HIGHEST_ID}" if high is None else f"0 <= id < {high}"
        first = f"first at row {row}, MoE layer {layer}: {value}; must be {rule}"
        text = f"{int(outside.sum())} ids outside, {first}"
        if value < 0:
            yield "dtype", text, f"wrapped through {routes.dtype}, or -1 for a missing row"
        else:
            yield "range", text, "another model, or a wider wire type"
    if high is not None and high > 256 and routes.dtype.itemsize == 1:
        text = f"{routes.dtype} cannot hold ids of {high} experts"
        yield "dtype", text, "ids above 255 wrapped: store 16 bits"
    zero = np.zeros(routes.shape[:2], bool)
    if routes.shape[2] > 1:
        zero = (routes == 0).all(-1) & present[:, None]
    if zero.any():
        yield "zero", *name_zeros(zero)
    ordered = np.sort(routes, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~zero & present[:, None]
    if repeated.any():
        row, layer = np.unravel_index(repeated.argmax(), repeated.shape)
        first = f"first at row {row}, MoE layer {layer}: {routes[row, layer].tolist()}"
        cause = "bytes shifted or of another dtype; a token would lose gate weight"
        yield "duplicate", f"{int(repeated.sum())} rows repeat an id, {first}", cause


def name_zeros(zero: np.ndarray) -> tuple[str, str]:
    """Return (text, cause) of all-zero rows, bool [S - 1, L]: entire layers, the last rows, or some
    rows.
    """
    layers = np.flatnonzero(zero.all(0))
    if len(layers):
        return (
            f"MoE layers {layers.tolist()} are all zero",
            "the server never wrote these layers (dense, or another rank's)",
        )
    rows = np.flatnonzero(zero.all(1))
    if len(rows) and rows[-1] == len(zero) - 1 and len(rows) == len(zero) - rows[0]:
        return (
            f"rows {rows[0]} to the end are all zero",
            "zero-filled to the length: routes end before the tokens do",
        )
    return (
        f"{int(zero.sum())} all-zero rows, first row {int(zero.any(1).argmax())}",
        "zero used for missing",
    )


def check_stuck(dumped: Dumped, routes: np.ndarray) -> Problems:
    """Check runs of equal rows (as sets) whose tokens are not all equal.

    Rows that repeat an id fail another check.
    """
    ordered = np.sort(routes, axis=-1)
    valid = (ordered[..., 1:] != ordered[..., :-1]).all((1, 2)) & dumped.present
    same = np.append((ordered[1:] == ordered[:-1]).all((1, 2)), False)
    start, longest = 0, (0, 0)
    for end in (np.flatnonzero(~same) + 1).tolist():
        is_longer = valid[start] and end - start > longest[1]
        if is_longer and len(np.unique(dumped.tokens[start:end])) > 1:
            longest = start, end - start
        start = end
    first, count = longest
    if count >= STUCK_ROWS and len(same) * chance_of_run(ordered, first, count) < LEAST_CHANCE:
        text = f"rows {first} to {first + count - 1} are one row repeated"
        yield "stuck", text, "a buffer that was not advanced"


def chance_of_run(ordered: np.ndarray, first: int, count: int) -> float:
    """Return the chance that rows of sorted ids [rows, L, K] repeat the previous one `count` - 1
    times.

    It is estimated from how often each layer does so elsewhere in the rollout (rule of succession),
    as if layers were independent.  The frequency of the choice itself would be too low, because
    neighbouring rows are similar.
    """
    repeats = (ordered[1:] == ordered[:-1]).all(-1)
    elsewhere = np.delete(repeats, slice(first, first + count - 1), 0)
    return float(((elsewhere.sum(0) + 1) / (len(elsewhere) + 2)).prod() ** (count - 1))


@dataclass
class Across:
    """Checks over several rollouts, which are added one by one."""

    sizes: Sizes | None
    budget: int = 0
    """The run's rollout.max_staleness."""
    shapes: dict[tuple[int, ...], str] = field(default_factory=dict)
    """[L, K] -> the first rollout that has it."""
    copies: dict[tuple[int, ...], Copies] = field(default_factory=dict)
    """[L, K] -> the search for copied routes."""
    versions: dict[int, dict[int, int]] = field(default_factory=dict)
    """Step -> version -> rollouts with tokens of it."""
    with_routes: dict[bool, int] = field(default_factory=dict)
    """Has routes (bool) -> number of rollouts."""
    highest: int = 0
    """The largest expert id."""
    num_ids: int = 0
    """Number of expert ids."""
    alignment: dict[int, Alignment] = field(
        default_factory=lambda: {shift: Alignment() for shift in (-1, 0, 1)}
    )

    def add(self, dumped: Dumped) -> None:
        record = dumped.record
        counts = self.versions.setdefault(record.step, {})
        for version in sorted({version for version, _ in record.policy_versions}):
            counts[version] = counts.get(version, 0) + 1
        routes = dumped.routes
        self.with_routes[routes is not None] = self.with_routes.get(routes is not None, 0) + 1
        if routes is None or routes.ndim != 3 or routes.dtype.kind not in "iu" or not routes.size:
            return
        name = f"step {record.step} {record.id}"
        self.shapes.setdefault(routes.shape[1:], name)
        highest = int(routes.max())
        if highest > HIGHEST_ID:
            return  # check_ids says so
        self.highest = max(self.highest, highest)
        self.num_ids += routes.size
        copies = self.copies.setdefault(routes.shape[1:], Copies(routes.shape[1]))
        copies.add(name, dumped.tokens, routes, dumped.present)
        for shift, alignment in self.alignment.items():
            alignment.add(dumped, routes, shift)

    def findings(self) -> Iterator[Finding]:
        for copies in self.copies.values():
            for name, other in copies.found():
                text = f"expert ids equal those of {other}, the tokens differ"
                yield Finding("copied", name, text, "another request's answer")
        if len(self.shapes) > 1:
            kinds = ", ".join(f"{list(shape)} ({name})" for shape, name in self.shapes.items())
            text = f"[layers, top-k] differ: {kinds}"
            yield Finding("shape", "dump", text, "two models, or a payload reshaped wrongly")
        if len(self.with_routes) > 1:
            text = f"{self.with_routes[False]} rollouts have no expert ids, others do"
            yield Finding("files", "dump", text, "a server without the option")
        num_experts = 0 if self.sizes is None else self.sizes.num_experts
        if num_experts > 256 > self.highest and self.num_ids >= LEAST_IDS:
            text = f"no id above 255 among {self.num_ids}, the model has {num_experts} experts"
            yield Finding("dtype", "dump", text, "ids wrapped in an 8-bit type")
        yield from self.check_versions()
        scores = {shift: alignment.score() for shift, alignment in self.alignment.items()}
        best = max(scores, key=lambda shift: (scores[shift] or 0.0, shift == 0))
        least = CLEARLY_BETTER * (scores[0] or 0.0)
        if None not in scores.values() and (scores[best] or 0.0) > least:
            named = ", ".join(f"{value:.3f} at shift {shift:+d}" for shift, value in scores.items())
            text = f"rows of equal tokens share experts best at shift {best:+d} ({named})"
            yield Finding("alignment", "dump", text, shift_cause(best))

    def check_versions(self) -> Iterator[Finding]:
        newest, rule = -1, f", must be at most rollout.max_staleness = {self.budget} apart"
        for step, counts in sorted(self.versions.items()):
            if max(counts) - min(counts) > self.budget:
                mix = ", ".join(f"version {version}: {n}" for version, n in sorted(counts.items()))
                text = f"mixed weight versions ({mix}){rule}"
                yield Finding("versions", f"step {step}", text, "sampled across a weight sync")
            if min(counts) < newest - self.budget:
                text = f"version {min(counts)} after version {newest}{rule}"
                cause = "a server kept, or returned to, old weights"
                yield Finding("versions", f"step {step}", text, cause)
            newest = max(newest, *counts)


class Alignment:
    """The agreement of rows with the same response token in the first MoE layer's experts, if row j
    belonged to token j + shift.

    The first router depends mostly on the token, so the agreement is largest at the shift at which
    rows have the experts of their tokens.  Prompts are left out: the rollouts of a group share
    theirs, and equal contexts agree at any shift.
    """

    def __init__(self) -> None:
        self.uses = np.zeros((0, 0), np.int64)  # [token, expert]: rows that use the expert
        self.rows = np.zeros(0, np.int64)  # [token]: rows of the token

    def add(self, dumped: Dumped, routes: np.ndarray, shift: int) -> None:
        rows = np.arange(dumped.record.prompt_length + 1, min(len(routes), len(dumped.tokens) - 1))
        rows = rows[dumped.present[rows]]
        tokens, ids = dumped.tokens[rows + shift], routes[rows, 0].astype(np.int64)
        good = (tokens >= 0) & (tokens < COMMON_TOKENS) & (ids >= 0).all(1)
        tokens, ids = tokens[good], ids[good]
        if not len(tokens):
            return
        missing = int(tokens.max()) + 1 - len(self.uses), int(ids.max()) + 1 - self.uses.shape[1]
        grow_tokens, grow_ids = (max(0, n) for n in missing)
        self.uses = np.pad(self.uses, ((0, grow_tokens), (0, grow_ids)))
        self.rows = np.pad(self.rows, (0, grow_tokens))
        np.add.at(self.uses, (tokens[:, None], ids), 1)
        np.add.at(self.rows, tokens, 1)

    def score(self) -> float | None:
        """Return the mean number of experts that two rows of a token share, or None if there are
        fewer than LEAST_PAIRS such pairs.
        """
        pairs = int((self.rows * (self.rows - 1)).sum())  # each pair in both orders
        if pairs < 2 * LEAST_PAIRS:
            return None
        return int((self.uses * (self.uses - 1)).sum()) / pairs


def shift_cause(shift: int) -> str:
    """Return the cause if row j has the experts of token j + shift."""
    return f"shifted by one: row j has the experts of token j {'+' if shift > 0 else '-'} 1"
