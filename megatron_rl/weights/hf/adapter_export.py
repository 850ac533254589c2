"""Low-rank adapters of a megatron-core model -> a stream of A and B under PEFT's names.

Servers with slots for adapters take them in this form (weights/sync/adapter_push.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import Entry
from megatron_rl.weights.hf.export import HFStream, HFTensor, gather_shards, plan_export
from megatron_rl.weights.hf.mapping import local_parameters, to_hf
from megatron_rl.weights.hf.peft_folder import ROOT, adapted

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.distributed import Parallel

SLOT_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""HF's names of the modules that servers have slots for."""
Shape = tuple[int, ...]


class Factors(Protocol):
    """This rank's shards of an adapter (engine/adapter.py)."""

    a: torch.Tensor
    b: torch.Tensor


def adapter_tensors(spec: ModelSpec, lora: LoraConfig) -> list[tuple[Entry, dict[str, Shape]]]:
    """Return the weights with an adapter, each with name -> shape of the tensors that are sent:
    A [r, i], then B [o, r], of each HF tensor.

    Raises ConfigError for a weight that servers have no slot for.
    """
    tensors = []
    for entry in adapted(spec, lora.targets):
        shapes: dict[str, Shape] = {}
        for name, (rows, columns) in entry.hf:
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in SLOT_MODULES:
                raise ConfigError(
                    f"rollout.weight_sync = adapter with lora.targets = {list(lora.targets)}:"
                    f" servers have slots for {', '.join(SLOT_MODULES)}, and none for {module}; set"
                    " another rollout.weight_sync, which sends merged weights"
                )
            shapes[f"{ROOT}{module}.lora_A.weight"] = (lora.rank, columns)
            shapes[f"{ROOT}{module}.lora_B.weight"] = (rows, lora.rank)
        tensors.append((entry, shapes))
    return tensors


@torch.no_grad()
def export_adapters(
    chunks: Iterable[GPTModel], spec: ModelSpec, parallel: Parallel, lora: LoraConfig
) -> HFStream:
    """Yield A and B of every adapter, each complete on one rank.  Collective."""
    chunks = list(chunks)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    dtype = next(iter(parameters.values())).dtype
    shapes_of = {entry.name: shapes for entry, shapes in adapter_tensors(spec, lora)}
    for entry, ranks, source in plan_export(chunks, spec, parallel):
        if (shapes := shapes_of.get(entry.name)) is None:
            continue
        values: Sequence[torch.Tensor | None] = [None] * len(shapes)
        if parallel.rank in ranks:
            factors = cast(Factors, parameters[entry.name].adapter)  # type: ignore[attr-defined]
            is_row = entry.rule.kind == "row"  # its A is sharded, that of others is a copy
            sharded = factors.a if is_row else factors.b
            parts = [sharded]
            if len(ranks) > 1:
                parts = gather_shards(sharded, source, ranks, parallel.tp_group)
            if parallel.rank == source:
                a = torch.cat(parts, dim=1) if is_row else factors.a
                rows = to_hf(entry, [factors.b] if is_row else parts, spec)
                values = [tensor for _, b in rows for tensor in (a, b)]
        for (name, shape), tensor in zip(shapes.items(), values, strict=True):
            yield HFTensor(name, shape, dtype, source, tensor)
