"""Low-rank adapters of a megatron-core model -> a stream of A and B under PEFT's names.

Servers with slots for adapters take them in this form (weights/sync/adapter_push.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch

from megatron_rl.config import ConfigError
from megatron_rl.config.rules.adapter_rules import SLOT_MODULES
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import Entry
from megatron_rl.weights.hf.export import HFStream, HFTensor, gather_shards, plan_export
from megatron_rl.weights.hf.mapping import local_parameters, to_hf
from megatron_rl.weights.hf.peft_folder import ROOT
from megatron_rl.weights.hf.targets import adapted

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.distributed import Parallel


class Factors(Protocol):
    """This rank's shards of an adapter (engine/adapter.py)."""

    a: torch.Tensor
    b: torch.Tensor


def slot_weights(spec: ModelSpec, lora: LoraConfig) -> tuple[Entry, ...]:
    """Return the weights with an adapter.

    Raises ConfigError for one that servers have no slot for.
    """
    weights = adapted(spec, lora.targets)
    for name in (name for entry in weights for name in entry.hf_names):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in SLOT_MODULES:
            raise ConfigError(
                f"rollout.weight_sync = adapter with lora.targets = {list(lora.targets)}: servers"
                f" have slots for {', '.join(SLOT_MODULES)}, and none for {module}; set another"
                " rollout.weight_sync, which sends merged weights"
            )
    return weights


@torch.no_grad()
def export_adapters(
    chunks: Iterable[GPTModel], spec: ModelSpec, parallel: Parallel, lora: LoraConfig
) -> HFStream:
    """Yield A and B of every adapter, each complete on one rank.  Collective."""
    chunks = list(chunks)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    dtype = next(iter(parameters.values())).dtype
    names = {entry.name for entry in slot_weights(spec, lora)}
    for entry, ranks, source in plan_export(chunks, spec, parallel):
        if entry.name not in names:
            continue
        a: torch.Tensor | None = None
        rows: Sequence[torch.Tensor | None] = [None] * len(entry.hf)
        if parallel.rank in ranks:
            factors = cast(Factors, parameters[entry.name].adapter)  # type: ignore[attr-defined]
            is_row = entry.rule.kind == "row"  # its A is sharded, that of others is a copy
            sharded = factors.a if is_row else factors.b
            parts = [sharded]
            if len(ranks) > 1:
                parts = gather_shards(sharded, source, ranks, parallel.tp_group)
            if parallel.rank == source:
                a = torch.cat(parts, dim=1) if is_row else factors.a
                rows = [b for _, b in to_hf(entry, [factors.b] if is_row else parts, spec)]
        for (name, (height, width)), b in zip(entry.hf, rows, strict=True):
            module = ROOT + name.removesuffix(".weight")
            yield HFTensor(f"{module}.lora_A.weight", (lora.rank, width), dtype, source, a)
            yield HFTensor(f"{module}.lora_B.weight", (height, lora.rank), dtype, source, b)
