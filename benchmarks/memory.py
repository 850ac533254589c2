"""The memory model of --dry-run against the memory of one update on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/memory.py

A Qwen3-MoE of 4 layers, hidden 256, 16 experts, top-4, vocabulary 4,096, float32, one micro-batch
of 4 x 512 rows.  Activations are the storages that autograd keeps for backward (without
parameters), at their peak, with megatron-core's local layers and this project's attention;
TransformerEngine's layers keep other storages.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config, load_config
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.plan import memory
from megatron_rl.plan.activations import logits_bytes
from megatron_rl.records import Rollout
from tests.tiny import random_checkpoint

ROWS, SEQUENCE, VOCABULARY = 2048, 512, 4096
MIB = 1 << 20


class Saved:
    """Bytes of floating-point storages that autograd holds, each counted once; `peak` of them."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters, self.held, self.now, self.peak = parameters, dict[int, int](), 0, 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point() or storage.data_ptr() in self.parameters:
            return tensor
        box = [tensor]
        kept = Kept(box)
        self._add(storage.data_ptr(), storage.nbytes())
        weakref.finalize(kept, self._drop, storage.data_ptr(), storage.nbytes())
        return kept

    def _add(self, at: int, size: int) -> None:
        self.held[at] = self.held.get(at, 0) + 1
        self.now += size if self.held[at] == 1 else 0
        self.peak = max(self.peak, self.now)

    def _drop(self, at: int, size: int) -> None:
        self.held[at] -= 1
        self.now -= size if self.held[at] == 0 else 0


class Kept:
    def __init__(self, box: list[Tensor]) -> None:
        self.box = box


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(
            Path(folder) / "model", hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
        )  # fmt: skip
        for recompute in ("none", "selective", "full"):
            cfg = load_config(None, [], sections(path, recompute))
            for name, predicted, measured in measure(cfg):
                ratio = predicted / measured
                print(
                    f"recompute {recompute:9s} {name:12s} {predicted / MIB:8.2f} of"
                    f" {measured / MIB:8.2f} MiB, {ratio:.2f}"
                )


def sections(path: Path, recompute: str) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "dtype": "float32", "recompute": recompute},
        "data": {"train": "unused", "max_prompt_tokens": ROWS - 1024},
        "run": {"max_tokens_per_micro_batch": ROWS, "device": "cpu"},
        "optim": {"distributed": False},
        "replay": {"mode": "none", "measure": False},
    }


def measure(cfg: Config) -> list[tuple[str, int, int]]:
    """Return (part, predicted bytes, measured bytes) of one update."""
    parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
    engine = Engine(cfg, parallel, total_updates=2)
    batch = make_mini_batch(samples(), max_tokens=ROWS, rule=engine.pack_rule, dp_group=None)
    assert len(batch.micro_batches) == 1
    sums = MetricSums()
    old = engine.old_logprobs(batch, sums, replay="none")
    parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    saved = Saved({parameter.untyped_storage().data_ptr() for parameter in parameters})
    with torch.autograd.graph.saved_tensors_hooks(
        saved.pack, lambda kept: kept.box[0] if isinstance(kept, Kept) else kept
    ):
        engine.update(batch, old, sums, replay="none")
    predicted = memory.rank_memory(engine.spec, cfg, 1, 0)
    # of what autograd keeps: without the gradient of the LM head
    kept, beside = memory.activation_bytes(engine.spec, cfg, 0)
    activations = kept + max(beside, logits_bytes(engine.spec, cfg))
    parts = [
        ("weights", predicted.weights, sum(p.nbytes for p in parameters)),
        ("gradients", predicted.gradients, sum(p.main_grad.nbytes for p in parameters)),
        ("optimizer", predicted.optimizer, state_bytes(engine)),
        ("activations", activations, saved.peak),
    ]
    parallel.destroy()
    return parts


def state_bytes(engine: Engine) -> int:
    """Return the bytes of Adam's moments."""
    optimizers = getattr(engine.optimizer.core, "chained_optimizers", [engine.optimizer.core])
    states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
    return sum(
        value.nbytes
        for state in states
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    response = SEQUENCE - 4
    return [
        Sample(
            Rollout(
                id=str(index),
                tokens=rng.integers(2, VOCABULARY, SEQUENCE),
                prompt_length=4,
                rollout_logprobs=np.full(response, -8, np.float32),
                routed_experts=None,
                finish_reason="stop",
                policy_versions=np.zeros(response, np.int32),
            ),
            1.0,
        )
        for index in range(ROWS // SEQUENCE)
    ]


if __name__ == "__main__":
    main()
