"""The rollouts that a rehearsal trains on: invented ones, or those that a run saved.

Every replica trains on the same rollouts, so that all have the same micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import make_mini_batch, make_samples
from megatron_rl.batch.teacher_weights import with_teacher_weights
from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch, Sample
from megatron_rl.records.teacher_scores import TeacherScores, TeacherTop
from megatron_rl.records.token_sets import TokenSets, to_varints
from megatron_rl.rollout.saved.saved_steps import SavedSteps

PROMPT = 3
"""Tokens of an invented prompt."""


def sequence_lengths(cfg: Config, micro_batches: int, longest: int | None) -> list[int]:
    """Return the tokens of every sequence, with enough of them for so many micro-batches.

    The first sequence of each is the longest that the configuration allows (or `longest`, in
    tokens).  More of them, the last one shorter, fill the rest of the micro-batch, as far as it has
    room for 64 tokens.  Raises ValueError for `longest` above what the configuration allows: the
    memory of the plan, which is compared, is that of the configuration.
    """
    first = longest or cfg.longest_sequence
    if first > cfg.longest_sequence:
        raise ValueError(
            f"--length {first}: must be at most {cfg.longest_sequence}, data.max_prompt_tokens +"
            " rollout.max_response_tokens, for which memory is planned; raise these, or lower"
            " --length"
        )
    lengths = [first]
    room_left = cfg.run.max_tokens_per_micro_batch - first
    while room_left >= 64:
        lengths.append(min(first, room_left))
        room_left -= lengths[-1]
    return micro_batches * lengths


def invented_samples(
    spec: ModelSpec, cfg: Config, lengths: Sequence[int], turns: int = 1
) -> list[Sample]:
    """Make random sequences of these lengths, as the configuration has them sampled.

    turns: of each sequence, as many as fit.  With kept sets (rollout.top_p, top_k, min_p) every
    token's set is as large as rollout.top_k allows.  With rollout.max_staleness a sequence's tokens
    have all versions of the weights from the oldest allowed one on.  With teachers all are scored
    by the first one.
    """
    rng = np.random.default_rng(0)
    teachers = cfg.teachers.with_servers.values()
    beta = next((teacher.beta_at(0) for teacher in teachers), 0.0)
    return [
        Sample(
            invent(f"s{index}", spec, cfg, length, turns, rng),
            float(rng.normal()),
            teacher_weight=beta,
        )
        for index, length in enumerate(lengths)
    ]


def invent(
    name: str, spec: ModelSpec, cfg: Config, length: int, turns: int, rng: np.random.Generator
) -> Rollout:
    tokens = rng.integers(2, spec.vocab_size, length)
    parts = 2 * min(turns, (length - PROMPT + 1) // 2) - 1  # turns, and what is between them
    bounds = np.linspace(PROMPT, length, parts + 1).astype(int).tolist()
    rollout = Rollout(
        id=name,
        tokens=tokens,
        prompt_length=PROMPT,
        rollout_logprobs=np.empty(0, np.float32),
        routed_experts=invented_routes(spec, cfg, length - 1, rng),
        finish_reason="stop",
        policy_versions=np.empty(0, np.int32),
        environment=tuple(zip(bounds[1:-1:2], bounds[2:-1:2], strict=True)),
    )
    number = rollout.response_length
    logprobs = -math.log(spec.vocab_size) + 0.3 * rng.standard_normal(number)
    newest, sampled = cfg.rollout.max_staleness, tokens[rollout.sampled]
    kept = cfg.rollout.top_k if cfg.rollout.truncation is not None else 0
    rollout = replace(
        rollout,
        rollout_logprobs=logprobs.astype(np.float32),
        policy_versions=np.linspace(0, newest + 1, number, endpoint=False).astype(np.int32),
        sampling_mask=invented_sets(spec, kept, sampled),
    )
    if not cfg.teachers.with_servers:
        return rollout
    top, sets = None, invented_sets(spec, cfg.loss.teacher_top_k, sampled)
    if sets is not None:
        uniform = np.full(int(sets.sizes.sum()), -math.log(spec.vocab_size), np.float32)
        top = TeacherTop(sets, uniform)
    return rollout.with_teacher([TeacherScores(logprobs.astype(np.float32), top)])


def invented_routes(
    spec: ModelSpec, cfg: Config, num_rows: int, rng: np.random.Generator
) -> np.ndarray | None:
    """Return ids [num_rows, L, K], distinct in a row: neighbours, beginning anywhere."""
    if not (cfg.needs_routes and spec.moe_layers):
        return None
    first = rng.integers(0, spec.num_experts, (num_rows, len(spec.moe_layers), 1), np.int32)
    ids = (first + np.arange(spec.top_k, dtype=np.int32)) % spec.num_experts
    return ids.astype(np.uint8 if spec.num_experts <= 256 else np.int16)


def invented_sets(spec: ModelSpec, size: int, sampled: np.ndarray) -> TokenSets | None:
    """Return a set of `size` neighbouring ids for every sampled token, that token among them; None
    for a size of 0.
    """
    if size < 1:
        return None
    size = min(size, spec.vocab_size)
    steps = np.ones((len(sampled), size), np.int64)
    steps[:, 0] = np.minimum(sampled, spec.vocab_size - size)
    return TokenSets(np.full(len(sampled), size, np.uint16), to_varints(steps.reshape(-1)))


def saved_samples(
    folder: Path, spec: ModelSpec, cfg: Config, num_layers: int, dp_size: int, micro_batches: int
) -> list[Sample]:
    """Return sequences of replica 0 in the first step that the run in `folder` saved, for about so
    many micro-batches: the longest responses first, with all sequences of each.

    spec, cfg: of the whole model; of the routes the first `num_layers` MoE layers are kept.  Raises
    ValueError where the saved steps do not fit the configuration (SavedSteps).
    """
    one_step = cfg.model_copy(update={"run": cfg.run.model_copy(update={"num_steps": 1})})
    groups = SavedSteps(folder, one_step, spec).groups(0, 0, dp_size)
    groups = with_advantages(
        with_penalties(groups, cfg), cfg.advantage_kind, None,
        reward_weights=cfg.advantage.rewards,
    )  # fmt: skip
    groups = with_teacher_weights(groups, cfg, 0)
    samples = [
        sample for group in groups for sample in make_samples(group, cfg.batch.filter_truncated)
    ]
    samples.sort(key=lambda sample: -total_tokens(sample))
    room = micro_batches * cfg.run.max_tokens_per_micro_batch
    chosen: list[Sample] = []
    for sample in samples:
        if chosen and total_tokens(sample) > room:
            break
        room -= total_tokens(sample)
        chosen.append(replace(sample, rollout=with_layers(sample.rollout, num_layers)))
    return chosen


def total_tokens(sample: Sample) -> int:
    return sum(len(sequence.tokens) for sequence in sample.rollout.sequences)


def with_layers(rollout: Rollout, num_layers: int) -> Rollout:
    """Return the episode with the routes of its first MoE layers."""

    def cut() -> Iterator[Rollout]:
        for sequence in rollout.sequences:
            ids = sequence.routed_experts
            if ids is None:
                yield sequence
            else:
                yield replace(sequence, routed_experts=ids[:, :num_layers], routes_digest=None)

    *earlier, last = cut()
    return last.after(earlier)


def make_batch(engine: Engine, samples: Sequence[Sample]) -> MiniBatch:
    """Pack sequences into the micro-batches of one replica."""
    staleness = engine.cfg.rollout.max_staleness
    batch = make_mini_batch(
        samples,
        max_tokens=engine.cfg.run.max_tokens_per_micro_batch,
        rule=engine.pack_rule,
        dp_group=None,
    )
    dp_size = engine.parallel.dp_size
    return replace(
        batch,
        num_responses=batch.num_responses * dp_size,
        num_response_tokens=batch.num_response_tokens * dp_size,
        policy_version=newest_version(samples) if staleness else None,
    )


def newest_version(samples: Sequence[Sample]) -> int:
    return max(int(sample.rollout.policy_versions[-1]) for sample in samples)
