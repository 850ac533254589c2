"""Packed random batches for the loss tests.  A response is (log pi, log pi_old, log mu, A); an
empty one has no tokens.

A `Response` is one sequence.  Those with the same `episode` are one response of the mini-batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.loss import (
    LossConfig,
    LossInputs,
    Sequences,
    aggregate,
    count_kept,
    kept_tokens,
    policy_loss,
    select_tokens,
)


@dataclass
class Response:
    logprobs: Tensor
    old: Tensor
    mu: Tensor
    advantage: float
    episode: int | None = None  # None: it is a response of its own
    # of the complete mini-batch, see `prepare`
    selected: Tensor | None = None  # bool per token
    length: int | None = None  # tokens of all sequences of the episode
    kept: int | None = None  # n_i of kept_mean


EPISODES = (0, 1, 0, None, 1, 0)  # of `responses`: 3 sequences, 2, and a response of its own


def responses(seed, lengths=(4, 7, 1, 5, 6, 3), dtype=torch.float64, episodes=()):
    """Responses of every kind: stale or fresh, matched or mismatched engines, A of both signs and
    0.

    episodes: of the first responses; the sequences of one share its advantage.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(size, scale):
        return scale * torch.randn(size, generator=g, dtype=torch.float64)

    made = []
    for i, length in enumerate(lengths):
        staleness, mismatch = [0.4, 2e-4, 0.05, 0.4][i % 4], [0.8, 3e-4, 0.3][i % 3]
        logprobs = -3 * torch.rand(length, generator=g, dtype=torch.float64) - 0.05
        old = (logprobs + noise(length, staleness)).clamp(max=-1e-3)
        mu = (old + noise(length, mismatch)).clamp(max=-1e-3)
        advantage = [1.3, -0.7, 0.4, -1.1, 0.0][int(torch.randint(5, (1,), generator=g))]
        made.append(Response(logprobs.to(dtype), old.to(dtype), mu.to(dtype), advantage))
    first = {}
    for r, episode in zip(made, episodes, strict=False):
        r.episode = episode
        if episode is not None:
            r.advantage = first.setdefault(episode, r.advantage)
    return made


@dataclass
class Packed:
    """One micro-batch: every row's values; `rows[i]` are the rows of response i's tokens."""

    logprobs: Tensor
    old: Tensor
    mu: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Sequences
    rows: list[Tensor]
    selected: Tensor | None = None


def pack(batch, *, prompts=2, pads=3, group=None):
    """Responses end to end, each after `prompts` rows that are not learned, then pads; random
    values elsewhere.
    """
    total = sum(prompts + len(r.logprobs) for r in batch) + pads
    dtype = batch[0].logprobs.dtype
    values = [torch.full((total,), junk, dtype=dtype) for junk in (-0.7, float("nan"), 3.0, 0.0)]
    ids, lengths = torch.full((total,), -1), torch.ones(total, dtype=torch.long)
    mask, rows, at = torch.zeros(total, dtype=torch.bool), [], 0
    selected, kept = torch.zeros(total, dtype=torch.bool), torch.ones(total, dtype=torch.long)
    for i, r in enumerate(batch):
        size = len(r.logprobs)
        here = torch.arange(at + prompts, at + prompts + size)
        for column, value in zip(values, (r.logprobs, r.old, r.mu, r.advantage), strict=True):
            column[here] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        ids[at : at + prompts + size] = i
        lengths[at : at + prompts + size] = max(size if r.length is None else r.length, 1)
        mask[here] = True
        if r.kept is not None:
            kept[here] = r.kept
        if r.selected is not None:
            selected[here] = r.selected
        rows.append(here)
        at += prompts + size
    is_known = all(r.kept is not None for r in batch)
    sequences = Sequences(ids, len(batch), lengths, group, kept if is_known else None)
    return Packed(*values, mask, sequences, rows, selected)


def numbers(batch):
    """The number of the response that each sequence belongs to."""
    known = {}
    return [
        known.setdefault((i,) if r.episode is None else r.episode, len(known))
        for i, r in enumerate(batch)
    ]


def counts(batch):
    return {
        "num_responses": len({*numbers(batch)}),
        "num_response_tokens": sum(len(r.logprobs) for r in batch),
    }


def keys_of(mu):
    """A number per token that decides draws and ties of a selection: any will do that does not
    depend on the packing.
    """
    return (mu.double() * 1e12).nan_to_num().long() % 1_000_003


def shift_of(old, mu):
    """A router shift per token, from 0 to beyond the floor: any will do that does not depend on the
    packing.
    """
    return (old - mu).abs() / 2


def prepare(batch, config):
    """Fill what depends on the complete mini-batch."""
    number = numbers(batch)
    for r, own in zip(batch, number, strict=True):
        r.kept, r.length = (
            None,
            sum(len(x.logprobs) for x, other in zip(batch, number, strict=True) if other == own),
        )
    if config.switches.aggregation == "kept_mean":
        packed = pack(batch)
        with_kept_lengths(
            packed, config, torch.tensor([*number, -1])[packed.sequences.ids], len(batch)
        )
        for r, rows in zip(batch, packed.rows, strict=True):
            r.kept = int(packed.sequences.kept_lengths[rows[0]]) if len(rows) else 1
    if config.switches.select != "none":
        mu = torch.cat([r.mu for r in batch])
        old = torch.cat([r.old for r in batch])
        advantages = torch.cat([torch.full_like(r.mu, r.advantage) for r in batch])
        finite = torch.cat([r.old for r in batch]).isfinite()
        chosen = select_tokens(old, advantages, finite, keys_of(mu), config.switches)
        for r, part in zip(batch, chosen.split([len(r.mu) for r in batch]), strict=True):
            r.selected = part
    return batch


def with_kept_lengths(packed, config, responses, num_responses):
    """Fill `kept_lengths` from these rows alone."""
    kept = kept_tokens(packed.old, packed.mu, packed.mask, packed.sequences, config)
    packed.sequences = replace(
        packed.sequences, kept_lengths=count_kept(kept, responses, num_responses)
    )


def count_alone(packed, config):
    """Fill `kept_lengths` where the loss needs it and `prepare` did not: each sequence is a
    response of its own.
    """
    if config.switches.aggregation == "kept_mean" and packed.sequences.kept_lengths is None:
        with_kept_lengths(packed, config, packed.sequences.ids, packed.sequences.count)


def inputs_of(packed, config, logprobs, **optional):
    return LossInputs(
        logprobs, packed.old, packed.mu, packed.advantages, packed.mask, packed.sequences,
        selected=packed.selected,
        router_shift=shift_of(packed.old, packed.mu) if config.switches.router_shift else None,
        **optional,
    )  # fmt: skip


def run(packed, config, **global_counts):
    """(total, gradient per row, PolicyLoss) of one micro-batch."""
    count_alone(packed, config)
    logprobs = packed.logprobs.clone().requires_grad_()
    loss = policy_loss(inputs_of(packed, config, logprobs), config)
    total = aggregate(loss, packed.sequences, config, **global_counts)
    total.backward()
    return total.detach(), logprobs.grad, loss


def run_whole(batch, config, **packing):
    """(total, gradient per response) of a mini-batch in one micro-batch."""
    packed = pack(prepare(batch, config), **packing)
    total, gradient, _ = run(packed, config, **counts(batch))
    return total, [gradient[rows] for rows in packed.rows]


def loss_of(name, **switches):
    return LossConfig(name=name, **switches)
