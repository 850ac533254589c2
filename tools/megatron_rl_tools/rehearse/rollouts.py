"""Invented rollouts: random tokens and routes, with the lengths of the configuration.

Every replica trains on the same lengths, so that all have the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import MiniBatch
from megatron_rl_tools.verify_replay.fingerprints import make_sample, random_routes


def sequence_lengths(cfg: Config, micro_batches: int, longest: int | None) -> list[int]:
    """Return the tokens of every sequence, with enough of them for so many micro-batches.

    The first sequence of each is the longest that the configuration allows (or `longest`, in
    tokens); shorter ones fill the rest of the micro-batch, as far as it has room for 64 tokens.
    """
    room = cfg.run.max_tokens_per_micro_batch
    full = longest or cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    first = min(full, room)
    room_left = room - first
    lengths = []
    for _ in range(micro_batches):
        lengths.append(first)
        if room_left >= 64:
            lengths.append(room_left)
    return lengths


def make_samples(spec: ModelSpec, lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Make sequences of these lengths, with random routes where the model has experts."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        if spec.moe_layers:
            routes = random_routes(
                rng, length - 1, len(spec.moe_layers), spec.num_experts, spec.top_k, None
            )
            sample = make_sample(rng, f"s{index}", routes, spec.vocab_size)
        else:
            empty = np.empty((length - 1, 0, 0), np.uint8)
            sample = make_sample(rng, f"s{index}", empty, spec.vocab_size)
            sample = replace(sample, rollout=replace(sample.rollout, routed_experts=None))
        samples.append(sample)
    return samples


def make_batch(engine: Engine, lengths: Sequence[int], *, seed: int = 0) -> MiniBatch:
    """Pack invented sequences into the micro-batches of one replica."""
    batch = make_mini_batch(
        make_samples(engine.spec, lengths, seed=seed),
        max_tokens=engine.cfg.run.max_tokens_per_micro_batch,
        rule=engine.pack_rule,
        dp_group=None,
    )
    dp_size = engine.parallel.dp_size
    return replace(
        batch,
        num_responses=batch.num_responses * dp_size,
        num_response_tokens=batch.num_response_tokens * dp_size,
    )
