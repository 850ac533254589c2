"""What the proof gives to the engine: a random checkpoint, sequences, and one fingerprint route per (token, MoE layer).

Where a token must show up is worked out here in plain loops, from the definition of the layout and not from replay/layout.py.
Shapes: S tokens of a sequence, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import MiniBatch, PackedBatch, Rollout
from megatron_rl.weights.hf.mapping import entries

ROUNDS = 2  # two batches in a row: a route that outlives its batch shows in the second
SEQUENCES_PER_MICRO_BATCH = 2

Key = tuple[str, int, int]
"""(rollout, position, MoE layer)."""
Route = tuple[int, ...]
"""Expert ids, ascending."""


@dataclass(frozen=True)
class Shape:
    """Sizes that the given data depends on."""

    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    dp_size: int
    cp_size: int
    micro_batches: int


@dataclass(frozen=True)
class Given:
    """samples[round][replica][micro-batch] -> sequences; the same in every process, from one seed."""

    samples: tuple[tuple[tuple[tuple[Sample, ...], ...], ...], ...]
    is_unique: bool

    def rollouts(self, index: int) -> Iterator[Rollout]:
        for replica in self.samples[index]:
            for micro_batch in replica:
                yield from (sample.rollout for sample in micro_batch)

    def routes(self, index: int) -> dict[Key, Route]:
        """What every token of that round was given; the last token of a sequence has no route."""
        found = {}
        for rollout in self.rollouts(index):
            assert rollout.routed_experts is not None
            for position, layers in enumerate(rollout.routed_experts.tolist()):
                for layer, ids in enumerate(layers):
                    found[rollout.id, position, layer] = tuple(sorted(ids))
        return found

    def places(self, index: int) -> dict[str, tuple[int, int]]:
        """Rollout -> (replica, micro-batch)."""
        return {
            sample.rollout.id: (replica, number)
            for replica, micro_batches in enumerate(self.samples[index])
            for number, micro_batch in enumerate(micro_batches)
            for sample in micro_batch
        }


def make_given(shape: Shape, *, seed: int = 0) -> Given:
    """Random sequences with a random set of K experts for every (token, layer): no two alike where C(E, K) allows it.

    Lengths are the same in every round, and in micro-batches 2i and 2i + 1: what shapes cannot tell apart, routes must.
    """
    rng = np.random.default_rng(seed)
    pairs = -(-shape.micro_batches // 2)
    size = (shape.dp_size, pairs, SEQUENCES_PER_MICRO_BATCH)
    lengths = rng.integers(2 * shape.cp_size + 3, 6 * shape.cp_size + 7, size)
    num_routes = ROUNDS * 2 * int(lengths.sum()) * shape.num_layers
    is_unique = math.comb(shape.num_experts, shape.top_k) >= 2 * num_routes
    used: set[Route] | None = set() if is_unique else None
    rounds = tuple(
        tuple(
            tuple(
                tuple(
                    random_sample(rng, f"{index}.{replica}.{number}.{i}", int(length), shape, used)
                    for i, length in enumerate(lengths[replica, number // 2])
                )
                for number in range(shape.micro_batches)
            )
            for replica in range(shape.dp_size)
        )
        for index in range(ROUNDS)
    )
    return Given(rounds, is_unique)


def random_sample(rng: np.random.Generator, name: str, length: int, shape: Shape, used: set[Route] | None) -> Sample:
    dtype = np.uint8 if shape.num_experts <= 256 else np.int16
    routes = np.empty((length - 1, shape.num_layers, shape.top_k), dtype)
    for row in routes.reshape(-1, shape.top_k):
        row[:] = rng.permutation(shape.num_experts)[: shape.top_k]
        while used is not None and tuple(sorted(row.tolist())) in used:
            row[:] = rng.permutation(shape.num_experts)[: shape.top_k]
        if used is not None:
            used.add(tuple(sorted(row.tolist())))
    prompt = 3
    rollout = Rollout(
        id=name,
        tokens=rng.integers(2, shape.vocab_size, length),
        prompt_length=prompt,
        rollout_logprobs=(-math.log(shape.vocab_size) + 0.3 * rng.standard_normal(length - prompt)).astype(np.float32),
        routed_experts=routes,
        finish_reason="stop",
        policy_versions=np.zeros(length - prompt, np.int32),
    )
    return Sample(rollout, float(rng.normal()))


def make_batch(replicas: Sequence[Sequence[Sequence[Sample]]], replica: int, rule: PackRule) -> MiniBatch:
    """This replica's mini-batch; each micro-batch ends in a few pad rows, and rows of micro-batches 2i, 2i + 1 are equal."""
    micro_batches = []
    for number, samples in enumerate(replicas[replica]):
        peers = replicas if rule.equal_sizes else [replicas[replica]]
        lengths = [
            max(rule.sequence_rows(len(peer[number][i].rollout.tokens)) for peer in peers) for i in range(len(samples))
        ]
        micro_batches.append(pack(samples, rule.rows([*lengths, rule.sequence_rows(4)])))
    everyone = [sample.rollout for peer in replicas for micro_batch in peer for sample in micro_batch]
    num_tokens = sum(rollout.response_length for rollout in everyone)
    return MiniBatch(tuple(micro_batches), num_responses=len(everyone), num_response_tokens=num_tokens)


def rows_on_rank(
    samples: Sequence[Sample],
    batch: PackedBatch,
    cp_rank: int,
    cp_size: int,
    part: int = 0,
    parts: int = 1,
    *,
    padded: bool = False,
) -> list[tuple[str, int] | None]:
    """Who must sit in each of a rank's rows: (rollout, position), or None for a pad.

    Of every sequence, pads included, CP rank r keeps chunks r and 2 cp - 1 - r of 2 x cp.  Packed: what is left lies end to
    end, and sequence parallelism gives tensor rank `part` the part-th of `parts` equal slices.  Padded: it gives that slice of
    each sequence, and the rows go position by position, all sequences at each.
    """
    mine: list[list[tuple[str, int] | None]] = []
    for number, length in enumerate(batch.cu_seqlens.diff().tolist()):
        rollout = samples[number].rollout if number < len(samples) else None
        mine.append([])
        for position in range(length):
            chunk = position * 2 * cp_size // length
            if cp_size == 1 or chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
                is_token = rollout is not None and position < len(rollout.tokens)
                mine[-1].append((rollout.id, position) if rollout is not None and is_token else None)
    if padded:
        size = len(mine[0]) // parts
        return [row[index] for index in range(part * size, (part + 1) * size) for row in mine]
    rows = [who for sequence in mine for who in sequence]
    size = len(rows) // parts
    return rows[part * size : (part + 1) * size]


def logprob_keys(
    samples: Sequence[Sample], batch: PackedBatch, cp_rank: int, cp_size: int
) -> list[tuple[str, int] | None]:
    """For each row of a rank's log-probs: (rollout, position) where it predicts a response token, else None."""
    by_id = {sample.rollout.id: sample.rollout for sample in samples}

    def predicts(who: tuple[str, int] | None) -> bool:
        if who is None:
            return False
        rollout = by_id[who[0]]
        return rollout.prompt_length - 1 <= who[1] < len(rollout.tokens) - 1

    rows = rows_on_rank(samples, batch, cp_rank, cp_size)
    return [who if predicts(who) else None for who in rows]


# Checkpoints --------------------------------------------------------------------------------------------------------


def small_config(
    *, num_layers: int, num_experts: int, top_k: int, first_k_dense: int, tp: int, etp: int
) -> dict[str, Any]:
    """config.json of a small Qwen3-MoE that every layout of these sizes divides."""
    kv_heads = math.lcm(2, tp)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": num_layers,
        "mlp_only_layers": list(range(first_k_dense)),
        "decoder_sparse_step": 1,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "hidden_size": 64,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": 32 * tp,
        "moe_intermediate_size": 16 * etp,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def shrunk_config(
    hf: dict[str, Any], *, tp: int, etp: int, stages: int, num_layers: int | None = None
) -> dict[str, Any]:
    """`hf` with narrow matrices, few words and num_layers, or as few as keep its dense ones and divide `stages` evenly.

    What layouts turn on stays: heads, experts, top-k, gate normalisation, tied embeddings, dense layers at the front.
    """
    spec = make_spec(hf)
    wanted = max(4, spec.moe_layers[0] + 2, stages)
    num_layers = num_layers or min(spec.num_layers, -(-wanted // stages) * stages)
    dense = sorted(set(range(num_layers)) - set(spec.moe_layers))
    return {
        **small_config(
            num_layers=num_layers, num_experts=spec.num_experts, top_k=spec.top_k, first_k_dense=0, tp=tp, etp=etp
        ),
        "architectures": [spec.architecture],
        "mlp_only_layers": dense,
        "norm_topk_prob": not spec.router.pre_softmax,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "tie_word_embeddings": spec.tie_embeddings,
    }


def write_random_checkpoint(config: dict[str, Any], path: Path, *, seed: int = 0) -> ModelSpec:
    """An HF checkpoint with this config.json and random weights, large enough that routes and logits are distinct."""
    spec = make_spec(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for entry in entries(spec):
        for name, shape in entry.hf:
            if "norm" in name:
                tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
            else:
                scale = 0.5 if name.endswith("mlp.gate.weight") else 0.1
                tensors[name] = scale * torch.randn(shape, generator=generator)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return spec
