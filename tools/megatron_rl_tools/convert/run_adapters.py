"""The adapters of a run's checkpoint ([lora]): as a PEFT folder, or merged into their base."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from safetensors import SafetensorError, safe_open
from torch import nn

from megatron_rl.checkpoint.folder import STATE, State, read_state
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.config.sections import LoraConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.adapter import Adapter, wide
from megatron_rl.engine.lora import make_adapter, make_factors, places
from megatron_rl.engine.lora_state import CoreModule, save_adapters
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.adapters import is_adapter
from megatron_rl.weights.hf.entries import Entry, entries
from megatron_rl.weights.hf.files import CheckpointError, HFFiles
from megatron_rl.weights.hf.mapping import to_hf
from megatron_rl.weights.hf.peft_folder import (
    CONFIG,
    DIGEST,
    DTYPE,
    TENSORS,
    Factors,
    write_peft,
)
from megatron_rl_tools.convert.conversion_files import (
    FileWork,
    fingerprint,
    finish_files,
    open_place,
)
from megatron_rl_tools.convert.conversion_sides import HFSide, Named


class RunAdapters:
    """The adapters that a checkpoint of a run holds."""

    def __init__(self, megatron: Path, state: State) -> None:
        self.path = megatron
        self.lora = LoraConfig.model_validate(state["config"]["lora"])
        self.dtype_name = str(state["config"]["model"]["dtype"])
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.digest = state.get("base")

    def describe(self) -> str:
        """Return one line about these adapters."""
        lora = self.lora
        return (
            f"adapters of rank {lora.rank}, scale {lora.scale:g}, on {', '.join(lora.targets)};"
            f" without their base (digest {self.digest})"
        )

    def read(self, config: Path, spec: ModelSpec, parallel: Parallel) -> dict[str, Factors]:
        """Return canonical name -> adapter of every weight that has one.  Collective.

        The whole adapters are in memory, in the dtype of the run; the base is not.
        """
        model = ModelConfig.model_validate(
            {"path": config, "dtype": self.dtype_name, "layer_spec": "local"}
        )
        core = make_transformer_config(spec, model, ParallelConfig(), torch.device("cpu"))
        core.perform_initialization = False
        on_meta = dataclasses.replace(parallel, device=torch.device("meta"))
        with torch.device("meta"):
            (chunk,) = make_model(spec, model, core, on_meta)
        owned: dict[nn.Module, dict[str, Adapter]] = {}
        adapted = places(chunk, spec, parallel, self.lora)
        for place in adapted:
            weight, rank = getattr(place.module, place.attribute), self.lora.rank
            rows, columns = weight.shape
            if not place.has_factors:
                values = weight.new_empty(rank, columns), weight.new_empty(rows, rank)
                make_factors(place, parallel, values)
            adapter = make_adapter(place, parallel, self.lora)
            owned.setdefault(place.owner, {})[place.suffix] = adapter
        for module, adapters in owned.items():
            save_adapters(module, adapters, parallel, spec)
        request = {key: on_host(part) for key, part in adapter_tensors(chunk).items()}
        chunk.load_state_dict(SafeCheckpoint(self.path).load(request), strict=False, assign=True)
        return {
            place.name: Factors(place.factor("a").detach(), place.factor("b").detach())
            for place in adapted
        }

    def check_base(self, files: HFFiles, spec: ModelSpec) -> None:
        """Raise CheckpointError where the files are not the base of these adapters."""
        digest = digest_of(files, spec, self.dtype)
        if digest != self.digest:
            raise CheckpointError(
                f"{self.path}: its adapters belong to other weights (digest {self.digest}) than"
                f" those of {files.path} ({digest}); set --config to the model.path of the run"
            )


def adapters_of_run(megatron: Path) -> RunAdapters | None:
    """Return the adapters of a checkpoint; None where it has a whole model."""
    if not (megatron / STATE).is_file():
        return None
    state = read_state(megatron)
    return RunAdapters(megatron, state) if state["config"].get("lora", {}).get("rank") else None


def describe_peft(path: Path) -> Iterator[str]:
    """Yield the lines that describe a PEFT folder.

    Raises CheckpointError where its files cannot be read.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        with safe_open(path / TENSORS, "pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            sizes = [math.prod(file.get_slice(name).get_shape()) for name in names]
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: no PEFT folder that can be read: {error}") from error
    yield f"{path}: PEFT, {config.get('peft_type')}"
    yield (
        f"rank {config.get('r')}, alpha {config.get('lora_alpha')}; {len(sizes)} tensors,"
        f" {sum(sizes) / 1e6:.1f} M parameters"
    )
    targets = [*as_list(config.get("target_modules")), *as_list(config.get("target_parameters"))]
    yield f"on {', '.join(targets)}"
    yield (
        f"base {config.get('base_model_name_or_path')}, digest"
        f" {metadata.get(DIGEST, 'not written: only shapes tell whether a model is its base')}"
    )


def as_list(value: object) -> list[str]:
    """Return PEFT's targets, which may be one regular expression."""
    return [value] if isinstance(value, str) else list(cast(Iterable[str], value or ()))


def adapter_tensors(chunk: nn.Module) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    tensors = cast(CoreModule, chunk).sharded_state_dict()
    return {key: tensor for key, tensor in tensors.items() if is_adapter(key)}


def on_host(
    part: ShardedTensor | ShardedTensorFactory,
) -> ShardedTensor | ShardedTensorFactory:
    """Return the request with memory for its values."""
    part.data = torch.empty(part.data.shape, dtype=part.data.dtype)
    return part


def digest_of(files: HFFiles, spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return engine.lora_state.base_digest of a model that was loaded from these files."""
    total = torch.zeros(1, dtype=torch.int64)
    for entry in entries(spec):
        kept = torch.float32 if entry.rule.float32 else dtype
        integer = {2: torch.int16, 4: torch.int32}[kept.itemsize]
        for name in entry.hf_names:
            total += files.read(name).to(kept).view(integer).sum(dtype=torch.int64)
    return f"{int(total) % 2**64:016x}"


class MergedSide(HFSide):
    """The base with its adapters: W + s B A in float32, rounded once to the run's dtype, as a layer
    multiplies by it.
    """

    def __init__(
        self, files: HFFiles, spec: ModelSpec, adapters: RunAdapters, of: Mapping[str, Factors]
    ) -> None:
        super().__init__(files, spec)
        self.adapters, self.factors = adapters, of

    def dtype(self, entry: Entry) -> torch.dtype:
        return torch.float32 if entry.rule.float32 else self.adapters.dtype

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        factors, first = self.factors.get(entry.name), 0
        rows_of_b = factors and to_hf(entry, [factors.b], self.spec)[index][1]
        for name, block in super().tensor(entry, index):
            values = block.to(self.dtype(entry))
            if factors is not None and rows_of_b is not None:
                b = rows_of_b[first : first + len(block)]
                delta = wide(b) @ wide(factors.a)
                values = torch.add(wide(values), delta, alpha=self.adapters.lora.scale)
                values = values.to(self.dtype(entry))
            first += len(block)
            yield name, values


def megatron_to_peft(
    megatron: Path, config: Path, out: Path, work: FileWork, parallel: Parallel
) -> int | None:
    """Write the adapters of a run's checkpoint as a PEFT folder, in one process; return the number
    of its tensors, or None if it exists already.

    config: HF directory of the base.  Raises CheckpointError for a checkpoint without adapters.
    """
    adapters = adapters_of_run(megatron)
    if adapters is None:
        raise CheckpointError(
            f"{megatron}: holds no adapters (lora.rank of its run is 0); use megatron-to-hf"
        )
    spec = make_spec(load_hf_config(config))
    if any(config.glob("*.safetensors")):
        with HFFiles(config) as files:
            adapters.check_base(files, spec)
    job = {"to": "peft", "from": fingerprint(megatron)}
    place = open_place(out, job, work)
    if place is None:
        return None
    count = write_peft(
        place,
        adapters.read(config, spec, parallel),
        spec,
        adapters.lora,
        base=config,
        metadata={DIGEST: str(adapters.digest), DTYPE: adapters.dtype_name},
    )
    finish_files(place, out, job)
    return count
