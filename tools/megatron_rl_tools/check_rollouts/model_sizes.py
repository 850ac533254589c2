"""The model of --model: its sizes, and its forward pass where the trainer is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

DENSE = "Qwen3ForCausalLM"
FAMILIES = (
    "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", DENSE,
)  # fmt: skip
"""Architectures whose config.json `read_sizes` can read: those that megatron_rl trains."""
NEEDS_TRAINER = "needs megatron_rl; in a checkout: pip install ."

Forward = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Tokens [S] of sequences -> the experts int64 [S - 1, L, K] that the model's routers choose."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that the checks compare with."""

    num_layers: int
    moe_layers: tuple[int, ...]
    """0-based indices of the layers with experts; empty for a dense model."""
    top_k: int
    num_experts: int
    vocab_size: int


@dataclass(frozen=True)
class Model:
    """The model of --model."""

    sizes: Sizes | None
    """None for an architecture that is not known; `notes` say so."""
    forward: Forward | None = None
    """None where megatron_rl is not installed."""
    notes: tuple[str, ...] = ()


def open_model(path: Path, dtype: str) -> Model:
    """Read the sizes of a checkpoint, and prepare its forward pass.

    Raises ValueError if config.json cannot be read, or if the trainer does not support the model.
    """
    forward = None
    if find_spec("megatron_rl") is not None:
        from megatron_rl_tools.check_rollouts.canary_forward import make_forward

        forward = make_forward(path, dtype)
    config = read_config_json(path)
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture in FAMILIES and config.get("moe_layer_freq") in (None, 1):
        return Model(read_sizes(config, is_dense=architecture == DENSE), forward)
    note = (
        f"--model: which layers of {architecture} have experts is not known; 4 checks run without "
        "the model's sizes: shape, range, dtype, mask"
    )
    return Model(None, forward, (note,))


def read_config_json(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"--model {path}: {file}: {error.strerror}; give an HF checkpoint directory"
        ) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object")
    return config


def read_sizes(config: Mapping[str, Any], *, is_dense: bool) -> Sizes:
    """Read the sizes of one of FAMILIES.  Raises ValueError for a missing key."""
    layers, vocab_size = need(config, "num_hidden_layers"), need(config, "vocab_size")
    if is_dense:
        return Sizes(layers, (), 0, 0, vocab_size)
    num_experts = need(config, "n_routed_experts", "num_local_experts", "num_experts")
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    without = config.get("mlp_only_layers") or ()
    moe_layers = tuple(
        layer for layer in range(first, layers) if layer not in without and (layer + 1) % step == 0
    )
    return Sizes(layers, moe_layers, need(config, "num_experts_per_tok"), num_experts, vocab_size)


def need(config: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first of these keys that is set: transformers renames them."""
    values = [int(config[key]) for key in keys if config.get(key) is not None]
    if not values:
        raise ValueError(f"config.json: key {' or '.join(keys)} is missing")
    return values[0]
