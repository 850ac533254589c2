"""The backend `bridge` of `megatron-rl convert`: Megatron-Bridge's own conversion, into the same
torch_dist format and back.

Megatron-Bridge fills (or reads) a model whose parameters have the names of TransformerEngine's
layers.  It gets the complete model that the engine builds, in the layout of one rank, under those
names; megatron-core itself writes and reads the checkpoint.  So this needs the memory of the whole
model, and its result can be compared with the backend `own` tensor by tensor.  An architecture that
only Bridge supports is built by Bridge itself, as for model.provider = bridge.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from megatron_rl.checkpoint.torch_dist.chunk_reader import OPTIMIZER, TorchDist
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.distributed.cpu import check_no_gpu
from megatron_rl.engine.bridge import BridgeProvider
from megatron_rl.engine.bridge_package import (
    TRANSFORMER_ENGINE,
    add_placeholder_transformer_engine,
    check_installed,
    first_line,
)
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.engine.provider import provider_of
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.files import (
    CheckpointError,
    HFFiles,
    dtype_name,
    read_headers,
    write_dtype,
)
from megatron_rl.weights.hf.mapping import local_parameters
from megatron_rl.weights.names import spellings
from megatron_rl_tools.convert.conversion import Conversion, group_bytes, reset_peak, resident_peak
from megatron_rl_tools.convert.conversion_files import (
    FileWork,
    copy_companions,
    fingerprint,
    finish_files,
    open_place,
)

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class Whole:
    """The complete model on one rank, with Bridge's functions for it."""

    spec: ModelSpec
    chunk: GPTModel
    fill: Callable[[], object]
    """Fills the model from its HF checkpoint."""
    write: Callable[[Path], object]
    """Writes the model as an HF checkpoint."""
    group_bytes: list[int]
    """Bytes of the HF tensors of each parameter."""
    num_tensors: int


def bridge_hf_to_megatron(
    hf: Path, out: Path, work: FileWork, *, dtype: torch.dtype | None, parallel: Parallel
) -> Conversion | None:
    """Write the torch_dist checkpoint of `hf` at `out`, in one process.

    Returns None if it exists already.
    """
    kept, make = dtype or common_dtype(hf, hf_dtypes(hf)), maker(hf)
    job = {"to": "megatron", "backend": "bridge", "from": fingerprint(hf), "dtype": str(kept)}
    place = open_place(out, job, work)
    if place is None:
        return None
    before, start = reset_peak(), time.monotonic()
    model = make(hf, kept, parallel)
    model.fill()
    weights = place / "weights"  # core needs an empty directory
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir()
    dist_checkpointing.save(model.chunk.sharded_state_dict(), str(weights))
    for file in list(weights.iterdir()):
        file.rename(place / file.name)
    weights.rmdir()
    warn_of_others(megatron_dtypes(place), kept, work)
    copy_companions(hf, place / "hf")
    finish_files(place, out, job)
    return outcome_of(model, before, start)


def bridge_megatron_to_hf(
    megatron: Path,
    config: Path,
    out: Path,
    work: FileWork,
    *,
    dtype: torch.dtype | None,
    parallel: Parallel,
) -> Conversion | None:
    """Write the HF checkpoint of `megatron` at `out`, in one process.

    Returns None if it exists already.  `config` must have weights: Megatron-Bridge takes the names
    of the tensors and of their files from there.
    """
    # DIR/hf has no weights, or those of multi-token prediction alone
    if config == megatron / "hf" or not any(config.glob("*.safetensors")):
        raise CheckpointError(
            f"{config}: has no safetensors of the model, from which --backend bridge takes names;"
            " set --config to the original"
        )
    kept, make = dtype or common_dtype(megatron, megatron_dtypes(megatron)), maker(config)
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
    model = make(config, kept, parallel)
    state = SafeCheckpoint(megatron).load(model.chunk.sharded_state_dict(), converts=True)
    model.chunk.load_state_dict(state)
    model.write(place)
    warn_of_others(hf_dtypes(place), kept, work)
    copy_companions(config, place)
    write_dtype(place, kept)
    finish_files(place, out, job)
    return outcome_of(model, before, start)


def outcome_of(model: Whole, before: int, start: float) -> Conversion:
    seconds, peak = time.monotonic() - start, max(resident_peak() - before, 0)
    return Conversion(
        model.num_tensors, sum(model.group_bytes), seconds, peak, max(model.group_bytes)
    )


def maker(hf: Path) -> Callable[[Path, torch.dtype, Parallel], Whole]:
    """Return the function that builds the model: the engine's if its tables have the architecture,
    else Bridge's.

    Checks the files first.
    """
    if provider_of(ModelConfig(path=hf, provider="auto")) == "bridge":
        check_installed()
        return model_of_bridge
    spec = make_spec(load_hf_config(hf))
    with HFFiles(hf) as files:
        files.check(spec)
    open_native(hf)
    return model_of_engine


def model_of_bridge(hf: Path, dtype: torch.dtype, parallel: Parallel) -> Whole:
    """Build an architecture that only Bridge supports, with the parameters and names of
    engine.bridge.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise CheckpointError(
            f"--backend bridge: {hf} has {name} tensors; set --dtype to float32 or bfloat16"
        )
    config = ModelConfig.model_validate(
        {"path": hf, "dtype": name, "layer_spec": "local", "provider": "bridge"}
    )
    provider = BridgeProvider(config, ParallelConfig(), parallel, {})
    (chunk,) = provider.build()
    headers = read_headers(hf).values()
    return Whole(
        provider.spec,
        chunk,
        lambda: provider.load([chunk]),
        lambda place: provider.bridge.save_hf_weights([chunk], str(place), show_progress=False),
        [torch.Size(header.shape).numel() * dtype.itemsize for header in headers],
        len(headers),
    )


def model_of_engine(hf: Path, dtype: torch.dtype, parallel: Parallel) -> Whole:
    """Build the engine's model, with the names of TransformerEngine's layers for Bridge."""
    spec, bridge = make_spec(load_hf_config(hf)), open_native(hf)
    chunk = build_model(hf, spec, dtype, parallel)
    return Whole(
        spec,
        chunk,
        lambda: bridge.load_hf_weights([renamed(chunk, spec, bridge)]),
        lambda place: bridge.save_hf_weights(
            [renamed(chunk, spec, bridge)], str(place), show_progress=False
        ),
        [
            group_bytes(entry, torch.float32 if entry.rule.float32 else dtype)
            for entry in entries(spec)
        ],
        sum(len(entry.hf) for entry in entries(spec)),
    )


def open_native(hf: Path) -> AutoBridge:
    """Open Megatron-Bridge's bridge for a checkpoint, or raise CheckpointError.

    Any version that supports the checkpoint will do: only its tables are used here, neither its
    layers nor its provider.
    """
    if importlib.util.find_spec("megatron.bridge") is None:
        raise CheckpointError(
            "--backend bridge: megatron.bridge is not installed here; install megatron-bridge, or"
            " use own"
        )
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        add_placeholder_transformer_engine()
    from megatron.bridge import AutoBridge

    try:
        return AutoBridge.from_hf_pretrained(str(hf))
    except ValueError as error:
        raise CheckpointError(f"--backend bridge: {hf}: {first_line(error)}") from error


def hf_dtypes(path: Path) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor except biases that select experts."""
    with HFFiles(path) as files:
        return {
            name: files.read_rows(name, 0, 1).dtype
            for name in files.headers
            if not name.endswith("correction_bias")
        }


def megatron_dtypes(path: Path) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter except biases that select experts."""
    source = TorchDist(path)
    names = (name for name in source.tensors() if not name.startswith(OPTIMIZER))
    dtypes = {name: source.dtype(name) for name in names if not name.endswith("expert_bias")}
    return {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}


def common_dtype(path: Path, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype of all tensors of a checkpoint; they must agree."""
    if len(kinds := set(dtypes.values())) != 1:
        raise CheckpointError(
            f"--backend bridge: {path} has tensors of several dtypes; set --dtype"
        )
    return kinds.pop()


def warn_of_others(dtypes: Mapping[str, torch.dtype], kept: torch.dtype, work: FileWork) -> None:
    """Name what Megatron-Bridge wrote in another dtype than was asked."""
    if others := sorted(name for name, dtype in dtypes.items() if dtype != kept):
        work.log(
            f"WARNING --backend bridge wrote {len(others)} of {len(dtypes)} tensors in another"
            f" dtype than {dtype_name(kept)}, first {others[0]} ({dtype_name(dtypes[others[0]])});"
            " use --backend own for an architecture that has it"
        )


def build_model(hf: Path, spec: ModelSpec, dtype: torch.dtype, parallel: Parallel) -> GPTModel:
    check_no_gpu()
    model = ModelConfig(path=hf, dtype="float32", layer_spec="local")
    core = make_transformer_config(spec, model, ParallelConfig(), torch.device("cpu"))
    core.perform_initialization = False
    core.params_dtype = dtype
    (chunk,) = make_model(spec, model, core, parallel)
    return chunk


class Node(torch.nn.Module):
    """A module of the renamed model.

    On one rank every parameter is complete, so Bridge may treat all of them as replicated.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config


def renamed(chunk: GPTModel, spec: ModelSpec, bridge: AutoBridge) -> GPTModel:
    """Make a GPTModel, the class that Megatron-Bridge requires, that shares the parameters of
    `chunk` under Bridge's names.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type(Node.__name__, "replicated")
    registry = bridge._model_bridge.mapping_registry()
    root = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(root)
    root.config, root.share_embeddings_and_output_weights = chunk.config, spec.tie_embeddings
    unknown = []
    for canonical, parameter in local_parameters([chunk], spec, 0, 1).items():
        names = spellings(canonical)
        has_mapping = (name for name in names if registry.megatron_to_hf_lookup(name) is not None)
        name = next(has_mapping, None)
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
            f"--backend bridge: Megatron-Bridge has no mapping for {', '.join(unknown[:3])} of"
            f" {spec.architecture}"
        )
    return root
