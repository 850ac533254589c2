"""ModelSpec: the settings of a checkpoint's config.json under one name for all families;
ConfigReader: how configs are read.

A family's reader (models/families.py) reads keys through a ConfigReader.  A key that it does not
read, and that is not known to have no effect on the forward pass, is an error: no setting is
silently ignored.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

HfConfig: TypeAlias = dict[str, Any]
"""A config.json."""


class ModelError(ValueError):
    """A checkpoint or model setting that is not supported; the message names the key, its value and
    the rule.
    """


@dataclass(frozen=True)
class RouterKind:
    """How a router scores and selects experts; core's `moe_router_*` settings.

    score_function   softmax | sigmoid
    pre_softmax      softmax over all experts, not over the selected ones: gate weights do not sum
                     to 1
    expert_bias      a bias per expert added to sigmoid scores for selection only, not to gate
                     weights
    num_groups       number of equal groups of experts; experts are selected from group_topk of them
    group_best       groups are ranked by the sum of this many of their best experts
    scaling_factor   factor on gate weights
    """

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_best: int = 2
    scaling_factor: float | None = None

    def core_limits_groups(self, top_k: int) -> bool:
        """Whether core's group limit computes this: it always ranks groups by their best top_k //
        group_topk experts.
        """
        return self.group_topk is not None and top_k // self.group_topk == self.group_best == 2


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings, named as in config.json."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


QkNorm = Literal["none", "head", "vector"]
"""RMSNorm of queries and keys: of each head alone, or of all heads together."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a client of a served model needs to check a response."""

    num_layers: int
    moe_layers: tuple[int, ...]
    """0-based global indices of the layers with experts, ascending; empty for a dense model."""
    top_k: int
    num_experts: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSizes):
    """All settings of the model.  A size that the model does not have is 0."""

    architecture: str
    router: RouterKind
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    expert_ffn_size: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qk_norm: QkNorm = "head"
    qkv_bias: bool = False
    rotary_fraction: float = 1.0
    yarn: Yarn | None = None
    shared_ffn_size: int = 0
    """MLP size of all shared experts together."""
    shared_gate: bool = False
    q_lora_rank: int = 0
    """Multi-latent attention (kv_lora_rank > 0): ranks, then head sizes without position, with
    position, and of values.
    """
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0
    mtp_layers: int = 0
    """Multi-token-prediction layers after the decoder's in the checkpoint: neither trained nor
    exported.
    """

    @property
    def has_head_norms(self) -> bool:
        return self.qk_norm == "head"

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of tp.

    Logits from vocab_size on are padding.
    """
    return -(-spec.vocab_size // tp) * tp


HARMLESS = {
    *("architectures", "model_type", "_name_or_path", "name_or_path", "transformers_version"),
    *("torch_dtype", "dtype", "use_cache", "auto_map", "initializer_range"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_router_logits",
        "router_aux_loss_coef",
    ),
    *("aux_loss_alpha", "seq_aux", "pretraining_tp", "id2label", "label2id"),
    *(
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "problem_type",
        "_attn_implementation",
    ),
    *(
        "attn_implementation",
        "experts_implementation",
        "is_encoder_decoder",
        "is_decoder",
        "use_flash_attn",
    ),
    *("chunk_size_feed_forward", "tokenizer_class", "max_window_layers", "ep_size"),
}
"""Keys without effect on the forward pass.

RL uses no balancing losses, so their coefficients have none either.
"""


class ConfigReader:
    """A config.json and which of its keys have been read.  End with finish()."""

    def __init__(self, hf: HfConfig) -> None:
        self.hf = hf
        self._read: set[str] = set()

    def need(self, *keys: str) -> Any:
        """The value of the first of these keys that is present (names differ between transformers
        versions).
        """
        self._read.update(keys)
        for key in keys:
            if self.hf.get(key) is not None:
                return self.hf[key]
        raise ModelError(f"config.json: key {' or '.join(keys)} is missing")

    def get(self, key: str, default: object) -> Any:
        """The value of a key that may be absent or null."""
        self._read.add(key)
        value = self.hf.get(key)
        return default if value is None else value

    def only(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the key is absent, null or has one of these values."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            names = " or ".join(repr(each) for each in allowed)
            raise ModelError(
                f"config.json {key} = {value!r}: not supported for {self.architecture}, only"
                f" {names}"
            )

    def refuse(self, key: str, rule: str) -> ModelError:
        return ModelError(
            f"config.json {key} = {self.hf.get(key)!r}: not supported for {self.architecture},"
            f" {rule}"
        )

    @property
    def architecture(self) -> str:
        return str((self.hf.get("architectures") or ["(none)"])[0])

    def finish(self) -> None:
        """Raise ModelError for a key that was not read, unless it is harmless, null, false or
        empty.
        """
        unknown = sorted(
            key for key, value in self.hf.items() if value and key not in self._read | HARMLESS
        )
        if unknown:
            shown = ", ".join(f"{key} = {self.hf[key]!r}" for key in unknown)
            raise ModelError(
                f"config.json {shown}: unknown for {self.architecture}, so it would be ignored; if"
                " it does not change what the model computes, remove it from config.json"
            )


def hub_hint(path: Path, options: str = "") -> str:
    """Say how to download what a path may name: ORG/NAME on the Hugging Face hub, where there is no
    such folder.
    """
    if path.parent.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return ""
    return (
        f"; nothing is downloaded: if it is a hub id, run `hf download {path}{options} --local-dir"
        " DIR` and name DIR"
    )


def load_hf_config(path: Path) -> HfConfig:
    """config.json of the checkpoint directory, not parsed by transformers: its attributes change
    between versions.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"model.path = {path}: no config.json there; give an HF checkpoint"
            f" directory{hub_hint(Path(path))}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"model.path = {path}: {error.strerror}; give an HF checkpoint directory"
        ) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must hold one JSON object")
    return config
