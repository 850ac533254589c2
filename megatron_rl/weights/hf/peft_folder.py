"""PEFT's folder of a low-rank adapter: adapter_config.json and adapter_model.safetensors.

PEFT has two factors for each HF tensor.  A weight that megatron fuses (qkv; gate and up) has one A
here: it is written for each of its HF tensors, whose rows of B it gets.  transformers 5 has the
routed experts of a layer as two parameters, [E, 2 I, H] and [E, H, I].  PEFT adapts them as
target_parameters: A [E r, in] has the experts one after another, B [out, r E] has value e of expert
e in each group of E columns.  PEFT adapts the transpose of an embedding [V, H]: its A [r, V] is our
B, its B [H, r] our A, both transposed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import OUTSIDE
from megatron_rl.weights.hf.entries import Entry, entries
from megatron_rl.weights.hf.mapping import to_hf
from megatron_rl.weights.hf.targets import adapted

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DIGEST, DTYPE = "base_digest", "base_dtype"
"""Keys of the safetensors file's metadata: digest of the base (engine.lora_state.base_digest), and
the dtype of the weights that it is of."""
ROOT = "base_model.model."
OF_EMBEDDING = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}
"""Name of a factor of ours -> name of its transpose in the PEFT adapter of an embedding."""
_LAYER = re.compile(r"model\.layers\.\d+\.")


class Factors(NamedTuple):
    """The adapter of a whole weight, in the order of megatron's rows: W' = W + s B A."""

    a: Tensor
    """A [r, i]."""
    b: Tensor
    """B [o, r]."""


class ExpertKeys(NamedTuple):
    """Names of the adapters of one layer's routed experts."""

    gate_up: str
    down: str


def expert_keys(layer: int, *, both: bool) -> ExpertKeys:
    """Return where PEFT has the adapters of a layer's experts; both: of the two parameters.

    PEFT wraps a module once for each of its parameters, in their order: what it wraps first,
    gate_up_proj, is the base_layer of the other.
    """
    module = f"{ROOT}model.layers.{layer}.mlp.experts"
    return ExpertKeys(f"{module}.base_layer" if both else module, module)


def is_gate_up(entry: Entry) -> bool:
    return entry.rule.kind == "glu"


# Writing ------------------------------------------------------------------------------------------


def write_peft(
    folder: Path,
    factors: Mapping[str, Factors],
    spec: ModelSpec,
    lora: LoraConfig,
    *,
    base: Path,
    metadata: Mapping[str, str],
) -> int:
    """Write the folder, and return the number of its tensors.

    factors: canonical name of every weight of lora.targets -> its adapter.  base: the HF checkpoint
    of the base.  metadata: DIGEST and DTYPE.
    """
    targets = adapted(spec, lora.targets)
    tensors = peft_tensors(targets, factors, spec)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, {"format": "pt", **metadata})
    config = peft_config(targets, spec, lora) | {"base_model_name_or_path": str(base)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors)


def peft_tensors(
    targets: Sequence[Entry], factors: Mapping[str, Factors], spec: ModelSpec
) -> dict[str, Tensor]:
    """Return the content of adapter_model.safetensors by name."""
    tensors: dict[str, Tensor] = {}
    experts: dict[tuple[int | None, bool], list[Factors]] = {}
    for entry in targets:
        a, b = factors[entry.name]
        if entry.rule.is_expert:
            experts.setdefault((entry.layer, is_gate_up(entry)), []).append(Factors(a, b))
            continue
        for name, rows in to_hf(entry, [b], spec):
            module = ROOT + name.removesuffix(".weight")
            for factor, values in (("lora_A.weight", a), ("lora_B.weight", rows)):
                if entry.name == OUTSIDE["embedding"]:
                    factor, values = OF_EMBEDDING[factor], values.T
                # a copy each: safetensors refuses tensors that share memory
                copy = values.clone(memory_format=torch.contiguous_format)
                tensors[f"{module}.{factor}"] = copy
    for (layer, gate_up), of_layer in experts.items():
        assert layer is not None
        keys = expert_keys(layer, both=(layer, not gate_up) in experts)
        module = keys.gate_up if gate_up else keys.down
        tensors[f"{module}.lora_A.weight"] = torch.cat([a for a, _ in of_layer])
        tensors[f"{module}.lora_B.weight"] = torch.stack([b for _, b in of_layer], 2).flatten(1)
    return tensors


def peft_config(targets: Sequence[Entry], spec: ModelSpec, lora: LoraConfig) -> dict[str, object]:
    """Return the content of adapter_config.json, without the base's path.

    In models with routed experts, PEFT would take gate_proj, up_proj and down_proj of other MLPs in
    target_modules for those of the experts: these MLPs are named as parameters, too.
    """
    of_targets, of_model = (
        Counter(_LAYER.sub("", name) for entry in some for name in parameter_names(entry))
        for some in (targets, entries(spec))
    )
    modules, parameters = set[str](), set[str]()
    for name in {name for entry in targets for name in parameter_names(entry)}:
        short = _LAYER.sub("", name)
        # the complete name where lora.targets leave a layer out
        name = short if of_targets[short] == of_model[short] else name
        if ".mlp." in f".{name}" and spec.moe_layers:
            parameters.add(name)
        else:
            modules.add(name.removesuffix(".weight"))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters),
        "inference_mode": True,
    }


def parameter_names(entry: Entry) -> tuple[str, ...]:
    """Return transformers' names of the parameters that a weight is, or is a part of."""
    if not entry.rule.is_expert:
        return entry.hf_names
    part = "gate_up_proj" if is_gate_up(entry) else "down_proj"
    return (f"model.layers.{entry.layer}.mlp.experts.{part}",)
