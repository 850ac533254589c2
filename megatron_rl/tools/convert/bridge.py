"""--backend bridge of convert_hf.py: Megatron-Bridge's own conversion, into the same torch_dist format and back.

Megatron-Bridge fills (or reads) a model whose parameters have the names of TransformerEngine's layers.  It gets the complete
model that the engine builds, in the layout of one rank, under those names; megatron-core itself writes and reads the checkpoint.
So this takes the memory of the model, and its result can be compared with the own backend tensor by tensor.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.tools.convert.conversion import Outcome, group_bytes, reset_peak, resident_peak
from megatron_rl.tools.convert.conversion_files import Work, copy_companions, fingerprint, finish, open_place
from megatron_rl.weights.hf.files import CheckpointError, HFFiles
from megatron_rl.weights.hf.mapping import entries, local_parameters
from megatron_rl.weights.names import spellings
from megatron_rl.weights.safe_load import SafeCheckpoint

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.core.transformer import TransformerConfig

TRANSFORMER_ENGINE = "transformer_engine"


def bridge_hf_to_megatron(
    hf: Path, out: Path, work: Work, *, dtype: torch.dtype | None, parallel: Parallel
) -> Outcome | None:
    """Write the torch_dist checkpoint of `hf` at `out`; None where it exists already.  One process."""
    spec = make_spec(load_hf_config(hf))
    with HFFiles(hf) as files:
        files.check(spec)
    bridge, kept = open_bridge(hf), dtype or stored_dtype(hf)
    job = {"to": "megatron", "backend": "bridge", "from": fingerprint(hf), "dtype": str(kept)}
    place = open_place(out, job, work)
    if place is None:
        return None
    before, start = reset_peak(), time.monotonic()
    chunk = build_model(hf, spec, kept, parallel)
    bridge.load_hf_weights([renamed(chunk, spec, bridge)])
    weights = place / "weights"  # core needs an empty directory
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir()
    dist_checkpointing.save(chunk.sharded_state_dict(), str(weights))
    for file in list(weights.iterdir()):
        file.rename(place / file.name)
    weights.rmdir()
    copy_companions(hf, place / "hf")
    finish(place, out, job)
    return outcome_of(spec, kept, before, start)


def bridge_megatron_to_hf(
    megatron: Path, config: Path, out: Path, work: Work, *, dtype: torch.dtype | None, parallel: Parallel
) -> Outcome | None:
    """Write the HF checkpoint of `megatron` at `out`; None where it exists already.  One process.

    `config` must have weights: Megatron-Bridge takes the names of the tensors and of their files from there.
    """
    if not any(config.glob("*.safetensors")):
        raise CheckpointError(
            f"{config}: has no safetensors, from which --backend bridge takes names; set --config to the original"
        )
    spec = make_spec(load_hf_config(config))
    bridge, kept = open_bridge(config), dtype or stored_dtype(config)
    job = {
        "to": "hf",
        "backend": "bridge",
        "from": fingerprint(megatron),
        "config": fingerprint(config),
        "dtype": str(kept),
    }
    place = open_place(out, job, work)
    if place is None:
        return None
    before, start = reset_peak(), time.monotonic()
    chunk = build_model(config, spec, kept, parallel)
    chunk.load_state_dict(SafeCheckpoint(megatron).load(chunk.sharded_state_dict()))
    bridge.save_hf_weights([renamed(chunk, spec, bridge)], str(place), show_progress=False)
    copy_companions(config, place, dtype)
    finish(place, out, job)
    return outcome_of(spec, kept, before, start)


def outcome_of(spec: ModelSpec, dtype: torch.dtype, before: int, start: float) -> Outcome:
    groups = [group_bytes(entry, torch.float32 if entry.rule.float32 else dtype) for entry in entries(spec)]
    tensors, peak = sum(len(entry.hf) for entry in entries(spec)), max(resident_peak() - before, 0)
    return Outcome(tensors, sum(groups), time.monotonic() - start, peak, max(groups))


def open_bridge(hf: Path) -> AutoBridge:
    """Megatron-Bridge's bridge of this checkpoint.  Raises CheckpointError if it is not installed or does not support it."""
    if importlib.util.find_spec("megatron.bridge") is None:
        raise CheckpointError(
            "--backend bridge: megatron.bridge is not installed here; install megatron-bridge, or use own"
        )
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        add_placeholder_transformer_engine()
    from megatron.bridge import AutoBridge

    try:
        return AutoBridge.from_hf_pretrained(str(hf))
    except ValueError as error:
        message = str(error).encode("ascii", "ignore").decode().strip().splitlines()[0][:300]
        raise CheckpointError(f"--backend bridge: {hf}: {message}") from error


def add_placeholder_transformer_engine() -> None:
    """A placeholder module: Megatron-Bridge imports TransformerEngine for LoRA layers that a conversion does not use.

    megatron-core has already been imported, and still runs without it.
    """
    modules = {}
    for name in (TRANSFORMER_ENGINE, f"{TRANSFORMER_ENGINE}.pytorch"):
        module = modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = partial(getattr, Absent)  # type: ignore[method-assign]
    sys.modules.update(modules)
    modules[TRANSFORMER_ENGINE].pytorch = modules[f"{TRANSFORMER_ENGINE}.pytorch"]  # type: ignore[attr-defined]


class _AnyName(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Absent(torch.nn.Module, metaclass=_AnyName):
    """The placeholder of every layer of TransformerEngine."""


def stored_dtype(hf: Path) -> torch.dtype:
    """The one dtype of all tensors except biases that select experts."""
    with HFFiles(hf) as files:
        kinds = {files.read_rows(name, 0, 1).dtype for name in files.headers if not name.endswith("correction_bias")}
    if len(kinds) != 1:
        raise CheckpointError(f"--backend bridge: {hf} has tensors of several dtypes; set --dtype")
    return kinds.pop()


def build_model(hf: Path, spec: ModelSpec, dtype: torch.dtype, parallel: Parallel) -> GPTModel:
    model = ModelConfig(path=hf, dtype="float32", layer_spec="local")
    core = make_transformer_config(spec, model, ParallelConfig(), torch.device("cpu"))
    core.perform_initialization = False
    core.params_dtype = dtype
    (chunk,) = make_model(spec, model, core, parallel)
    return chunk


class Node(torch.nn.Module):
    """A module of the renamed model.  On one rank every parameter is complete, so Bridge may treat all as replicated."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config


def renamed(chunk: GPTModel, spec: ModelSpec, bridge: AutoBridge) -> GPTModel:
    """A GPTModel, the class that Megatron-Bridge requires, that shares the parameters of `chunk` under Bridge's names."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type(Node.__name__, "replicated")
    registry = bridge._model_bridge.mapping_registry()
    root = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(root)
    root.config, root.share_embeddings_and_output_weights = chunk.config, spec.tie_embeddings
    unknown = []
    for canonical, parameter in local_parameters([chunk], spec, 0, 1).items():
        name = next((name for name in spellings(canonical) if registry.megatron_to_hf_lookup(name) is not None), None)
        if name is None:
            unknown.append(canonical)
            continue
        *path, last = name.split(".")
        node: torch.nn.Module = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, Node(chunk.config))
            node = node._modules[part]  # type: ignore[assignment]
        node.register_parameter(last, torch.nn.Parameter(parameter.detach(), requires_grad=False))
    if unknown:
        raise CheckpointError(
            f"--backend bridge: Megatron-Bridge has no mapping for {', '.join(unknown[:3])} of {spec.architecture}"
        )
    return root
