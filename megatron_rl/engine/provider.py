"""Model providers, which build, load and export the model: this program's own tables (native), or
Megatron-Bridge (bridge).

The other modules see a model through this protocol: its sizes, core's configuration, and three
operations.  Replay, losses, log-probs and checkpoints work on megatron-core's modules, whichever
provider made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.distributed.cpu import check_no_gpu
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.models.families import READERS, make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.hf.export import (
    ExportStep,
    HFStream,
    export_planned,
    few_sources,
    forwarded,
    plan_export,
)
from megatron_rl.weights.hf.load import load_hf


class ModelProvider(Protocol):
    """Makes the model of one HF checkpoint for one layout."""

    spec: ModelSpec
    core_config: TransformerConfig

    def build(self) -> list[GPTModel]:
        """Build the chunks of this pipeline stage, without the checkpoint's weights."""

    def load(self, chunks: list[GPTModel]) -> None:
        """Fill every parameter from the HF checkpoint.

        Raises CheckpointError where one stays unfilled.  Collective.
        """

    def export(self, chunks: list[GPTModel], max_sources: int) -> HFStream:
        """Yield every tensor of the HF checkpoint on one of at most `max_sources` ranks.

        Collective.
        """


class NativeProvider:
    """The ModelProvider that uses the tables of models/families.py and weights/hf/rules.py."""

    def __init__(
        self,
        model: ModelConfig,
        sizes: ParallelConfig,
        parallel: Parallel,
        fields: Mapping[str, object],
        spec: ModelSpec | None = None,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.spec = spec or make_spec(load_hf_config(model.path))
        self.core_config = make_transformer_config(self.spec, model, sizes, parallel.device, fields)
        self.plan: list[ExportStep] | None = None  # made by the first export, and kept

    def build(self) -> list[GPTModel]:
        return make_model(self.spec, self.model, self.core_config, self.parallel)

    def load(self, chunks: list[GPTModel]) -> None:
        load_hf(chunks, self.model.path, self.spec, self.parallel)

    def export(self, chunks: list[GPTModel], max_sources: int) -> HFStream:
        if self.plan is None:
            self.plan = plan_export(chunks, self.spec, self.parallel)
        stream = export_planned(self.plan, chunks, self.spec, self.parallel)
        # ranks beyond max_sources pass their tensors to a neighbour that is a source
        sources = few_sources(self.plan, max_sources)
        return forwarded(stream, sources, self.parallel.rank, self.parallel.device)


def make_provider(
    model: ModelConfig,
    sizes: ParallelConfig,
    parallel: Parallel,
    fields: Mapping[str, object],
    spec: ModelSpec | None = None,
) -> ModelProvider:
    """Make the provider that model.provider names.

    fields: the settings of [megatron].  spec: replaces the sizes of a native model.
    Raises ValueError for a model on the CPU where torch sees a GPU.
    """
    if parallel.device.type == "cpu":
        check_no_gpu()
    if provider_of(model) == "native" or spec is not None:
        return NativeProvider(model, sizes, parallel, fields, spec)
    # Megatron-Bridge is optional, and takes seconds to import
    from megatron_rl.engine.bridge import BridgeProvider

    return BridgeProvider(model, sizes, parallel, fields)


def provider_of(model: ModelConfig) -> Literal["native", "bridge"]:
    """Resolve model.provider = auto: native for every family that the native tables know."""
    if model.provider != "auto":
        return model.provider
    names = load_hf_config(model.path).get("architectures") or ["(none)"]
    return "native" if names[0] in READERS else "bridge"


def provider_spec(model: ModelConfig, device: torch.device | None = None) -> ModelSpec:
    """Return the sizes of the model, without building it.

    device: the device on which this process builds it afterwards, because a process chooses
    Bridge's layers once; None in a process that builds none.
    """
    if provider_of(model) == "native":
        return make_spec(load_hf_config(model.path))
    from megatron_rl.engine import bridge

    return bridge.read_spec(model, device)
