"""Reads a PEFT adapter to continue from (lora.path), exactly or not at all.

The folder may be an export of this program, or of the peft package: adapters of the modules that
lora.targets mean, experts fused as transformers 5 has them or one by one.  Where q, k and v (gate
and up) have each an A of their own, these are stacked, which takes the sum of their ranks.  The
base weights that PEFT saves beside adapters of embedding and LM head must be those of model.path.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import OUTSIDE
from megatron_rl.weights.hf.entries import Entry, find_entry
from megatron_rl.weights.hf.files import DTYPES, HFFiles
from megatron_rl.weights.hf.peft_folder import (
    CONFIG,
    DIGEST,
    DTYPE,
    OF_EMBEDDING,
    ROOT,
    TENSORS,
    expert_keys,
    is_gate_up,
)
from megatron_rl.weights.hf.targets import adapted

logger = logging.getLogger(__name__)

# fmt: off
WITHOUT_EFFECT = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "target_modules", "target_parameters", "task_type", "use_rslora",
))
# fmt: on
"""Keys of adapter_config.json that do not change W + s B A, or that are read here.  Any other that
is set is refused."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights with which PEFT changes the base: its saved A and B are not of ours.
"""


class Pair(NamedTuple):
    """PEFT's A and B of one HF tensor, or of one HF tensor of one expert."""

    module: str
    """Name of its keys before .lora_A.weight."""
    expert: int | None
    """Number of the expert whose part of the two tensors it is; None: all of them."""


Values = tuple[Tensor, Tensor] | None
"""A and B of one HF tensor; None where it has no adapter."""


class PeftFolder:
    """A PEFT adapter on disk, checked against a model and [lora]."""

    def __init__(self, path: Path, spec: ModelSpec, lora: LoraConfig) -> None:
        """Read the configuration, names and shapes.  Raises ConfigError for what cannot be
        continued exactly; nothing was changed then.
        """
        self.path, self.spec, self.lora = path, spec, lora
        self.config = read_config(path)
        try:
            self.file = safe_open(path / TENSORS, "pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"lora.path = {path}: {TENSORS} cannot be read: {error}; it must be a folder that"
                " PEFT or megatron-rl convert megatron-to-peft wrote"
            ) from error
        self.metadata: dict[str, str] = self.file.metadata() or {}
        names = {our_name(name): name for name in self.file.keys()}  # noqa: SIM118  (no mapping)
        self._names = names
        self.shapes = {name: self._shape(name) for name in names}
        self._read = lru_cache(maxsize=8)(self._factor)
        self.pairs = {entry.name: self._pairs(entry) for entry in adapted(spec, lora.targets)}
        if problem := next(self._problems(), None):
            raise ConfigError(f"lora.path = {path}: {problem}")

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor by our name, which is that of an embedding's transpose."""
        stored = self._names[name]
        shape = tuple(self.file.get_slice(stored).get_shape())
        return shape if stored == name else shape[::-1]

    def _factor(self, name: str) -> Tensor:
        """Return a tensor by our name in float32."""
        stored = self._names[name]
        values: Tensor = self.file.get_tensor(stored).float()
        return values if stored == name else values.T

    def _pairs(self, entry: Entry) -> list[Pair | None]:
        """Return the pair of each HF tensor of the entry; a fused one of experts is of them all."""
        pairs = [Pair(ROOT + name.removesuffix(".weight"), None) for name in entry.hf_names]
        separate = [pair if self._has(pair.module) else None for pair in pairs]
        if any(separate) or entry.layer is None or not entry.rule.is_expert:
            return separate
        parts = {name.rpartition(".")[2] for name in self.config.get("target_parameters") or ()}
        keys = expert_keys(entry.layer, both={"gate_up_proj", "down_proj"} <= parts)
        part = "gate_up_proj" if is_gate_up(entry) else "down_proj"
        module = keys.gate_up if is_gate_up(entry) else keys.down
        if part in parts and self._has(module):
            return [Pair(module, entry.expert)]
        return separate

    def _has(self, module: str) -> bool:
        return f"{module}.lora_A.weight" in self.shapes

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong between the tensors, the model and [lora]."""
        used = {
            f"{pair.module}.lora_{factor}.weight"
            for pairs in self.pairs.values()
            for pair in pairs
            if pair is not None
            for factor in "AB"
        }
        if unknown := sorted(self.shapes.keys() - used - self._copies().keys()):
            yield (
                f"{len(unknown)} of its {len(self.shapes)} tensors are of no weight that"
                f" lora.targets = {list(self.lora.targets)} mean, first {unknown[0]}; set"
                " lora.targets to what the adapter has (routers cannot have one)"
            )
        if missing := sorted(used - self.shapes.keys()):
            yield f"{TENSORS} lacks {missing[0]}; it is incomplete"
        for entry in adapted(self.spec, self.lora.targets):
            yield from self._problems_of(entry, self.pairs[entry.name])

    def _copies(self) -> dict[str, str]:
        """Return the names of base weights in the file -> their names in model.path."""
        names = [name for name, pairs in self.pairs.items() if name in OUTSIDE.values() and pairs]
        modules = [
            find_entry(name, self.spec).hf_names[0].removesuffix(".weight") for name in names
        ]
        copies = {f"{ROOT}{module}.base_layer.weight": f"{module}.weight" for module in modules}
        return {name: base for name, base in copies.items() if name in self.shapes}

    def _problems_of(self, entry: Entry, pairs: Sequence[Pair | None]) -> Iterator[str]:
        experts = self.spec.num_experts
        shapes = [shape for _, shape in entry.hf]
        if len(pairs) == 1:
            shapes = [(sum(rows for rows, _ in shapes), shapes[0][1])]
        for pair, (rows, columns) in zip(pairs, shapes, strict=True):
            if pair is None:
                continue
            a, b = (self.shapes[f"{pair.module}.lora_{factor}.weight"] for factor in "AB")
            rank = a[0] if pair.expert is None else a[0] // experts
            total = rank if pair.expert is None else rank * experts
            if a != (total, columns) or b != (rows, total):
                yield (
                    f"{pair.module} has A {list(a)} and B {list(b)}, but its weight has shape"
                    f" [{rows}, {columns}]; the adapter is of another base than model.path"
                )
                return
            scale = self._scale(pair, rank, entry)
            if not math.isclose(scale, self.lora.scale, rel_tol=1e-9):
                yield (
                    f"its scale of {pair.module} is {scale:g}, that of [lora] is"
                    f" {self.lora.scale:g} (rank = {self.lora.rank}, alpha = {self.lora.alpha:g});"
                    f" set lora.alpha = {self.lora.alpha_for(scale, self.lora.rank):g}"
                )
                return

    def _scale(self, pair: Pair, rank: int, entry: Entry) -> float:
        """Return alpha / rank of one pair, as PEFT computes it."""
        alpha, name = self.config.get("lora_alpha", 8), self._pattern_name(pair, entry)
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern_name(self, pair: Pair, entry: Entry) -> str:
        """Return what PEFT compares with patterns: a module's name, or that of a parameter of
        target_parameters.
        """
        name = pair.module.removeprefix(ROOT)
        if pair.expert is not None:
            part = "gate_up_proj" if is_gate_up(entry) else "down_proj"
            return f"{name.removesuffix('.base_layer')}.{part}"
        parameters = self.config.get("target_parameters") or ()
        is_parameter = any(f".{name}.weight".endswith(f".{target}") for target in parameters)
        return f"{name}.weight" if is_parameter else name

    def factors(self, entry: Entry, a: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return A [rank, i] and, for each HF tensor of the weight, its rows of B [o, rank].

        a: initial A, float32; rows that the folder lacks stay as they are, with columns of B that
        are 0, so that they change nothing.  Raises ConfigError where lora.rank is too small, and
        for experts with different adapters where they share a pair, whose entry has no number.
        """
        names = [entry.name]
        if entry.name not in self.pairs:
            names = [f"{entry.name}{expert}" for expert in range(self.spec.num_experts)]
        pairs, *others = (list(map(self._values, self.pairs[name])) for name in names)
        if not all(are_equal(pairs, other) for other in others):
            raise ConfigError(
                f"lora.path = {self.path}: experts of {entry.name} have different adapters; with"
                " lora.shared_pairs = true one serves them all: set it to false"
            )
        rows = [shape[0] for _, shape in entry.hf]
        if len(pairs) == 1 and len(rows) > 1 and pairs[0] is not None:  # experts, fused
            whole_a, whole_b = pairs[0]
            pairs = [(whole_a, part) for part in whole_b.split(rows)]
        distinct: list[Tensor] = []
        for pair in pairs:
            if pair is not None and not any(pair[0].equal(other) for other in distinct):
                distinct.append(pair[0])
        needed = sum(len(other) for other in distinct)
        if needed > self.lora.rank:
            why = f"{len(distinct)} matrices A" if len(distinct) > 1 else "its A"
            raise ConfigError(
                f"lora.path = {self.path}: {entry.name} needs rank {needed}, for {why} of"
                f" {', '.join(entry.hf_names)}; lora.rank = {self.lora.rank}: raise it to {needed},"
                f" and lora.alpha to {self.lora.alpha_for(self.lora.scale, needed):g}, which keeps"
                " the scale"
            )
        starts = [sum(len(other) for other in distinct[:i]) for i in range(len(distinct))]
        parts = []
        for pair, count in zip(pairs, rows, strict=True):
            part = a.new_zeros(count, self.lora.rank)
            if pair is not None:
                place = next(i for i, other in enumerate(distinct) if other.equal(pair[0]))
                part[:, starts[place] : starts[place] + len(pair[0])] = pair[1]
            parts.append(part)
        return torch.cat([*distinct, a[needed:]]), parts

    def _values(self, pair: Pair | None) -> Values:
        """Return A [r, i] and B [o, r] in float32; None for a HF tensor without an adapter."""
        if pair is None:
            return None
        a, b = (self._read(f"{pair.module}.lora_{factor}.weight") for factor in "AB")
        if pair.expert is None:
            return a, b
        rank = len(a) // self.spec.num_experts
        a = a[pair.expert * rank : (pair.expert + 1) * rank]
        return a, b[:, pair.expert :: self.spec.num_experts]

    def check_base(self, digest: str, dtype: torch.dtype, model: Path) -> list[str]:
        """Raise ConfigError for the adapter of another base; return what is not exact, or could not
        be checked.

        digest: that of model.path in `dtype` (engine.lora_state.base_digest).  model: model.path.
        """
        where, base = f"lora.path = {self.path}", self.config.get("base_model_name_or_path")
        saved, ours = self.metadata.get(DIGEST), str(dtype).removeprefix("torch.")
        if saved not in (None, digest):
            raise ConfigError(
                f"{where}: belongs to other weights (digest {saved} in {self.metadata.get(DTYPE)})"
                f" than those of model.path ({digest} in {ours}); set model.path and model.dtype to"
                f" those of its base ({base})"
            )
        for name, original in self._copies().items():
            with HFFiles(model) as files:
                values = files.read(original)
            copy = self.file.get_tensor(name)
            if copy.shape != values.shape or not bool((copy == values).all()):
                raise ConfigError(
                    f"{where}: {name} is not {original} of model.path = {model}; the adapter is of"
                    " another base, or its base was trained"
                )
        notes = []
        if saved is None:
            notes.append(
                f"{where}: has no digest of its base ({base}); only shapes were compared with"
                " model.path"
            )
        stored = {self.file.get_slice(name).get_dtype() for name in self._names.values()}
        finer = sorted(
            str(DTYPES[name]).removeprefix("torch.")
            for name in stored & DTYPES.keys()
            if torch.promote_types(DTYPES[name], dtype) != dtype
        )
        if finer:
            notes.append(
                f"{where}: its values are {' and '.join(finer)}; they are rounded to {ours}"
            )
        return notes


def are_equal(ours: Sequence[Values], theirs: Sequence[Values]) -> bool:
    """Return True for equal adapters of the HF tensors of two experts."""
    return all(
        a is b if a is None or b is None else a[0].equal(b[0]) and a[1].equal(b[1])
        for a, b in zip(ours, theirs, strict=True)
    )


def our_name(name: str) -> str:
    """Return our name of a factor that PEFT saved under `name`."""
    module, _, factor = name.rpartition(".")
    ours = {theirs: factor for factor, theirs in OF_EMBEDDING.items()}
    return f"{module}.{ours[factor]}" if factor in ours else name


def read_config(path: Path) -> dict[str, Any]:
    """Read adapter_config.json.  Raises ConfigError for adapters that are not W + s B A."""
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"lora.path = {path}: {CONFIG} cannot be read: {error}; it must be a folder that PEFT"
            " or megatron-rl convert megatron-to-peft wrote"
        ) from error
    kind, bias, start = config.get("peft_type"), config.get("bias"), config.get("init_lora_weights")
    if kind != "LORA":
        raise ConfigError(f"lora.path = {path}: peft_type = {kind}; only LORA can be continued")
    changed = sorted(key for key, value in config.items() if value and key not in WITHOUT_EFFECT)
    if bias not in (None, "none"):
        changed.insert(0, "bias")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        changed.insert(0, "init_lora_weights")
    if changed:
        raise ConfigError(
            f"lora.path = {path}: {changed[0]} = {config[changed[0]]!r} in {CONFIG}: this adapter"
            " is more than W + s B A; merge it into its base with PEFT, and train from that"
        )
    return config
