"""ModelSpec, the settings of a checkpoint's config.json under the same names for all families, and
ConfigReader, through which a family's reader (models/families.py) reads it.

A key that the reader does not read is an error, unless it is known to have no effect on the forward
pass: no setting is silently ignored.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatron_rl.config import ConfigError

HfConfig: TypeAlias = dict[str, Any]
"""The content of a config.json."""

FOLDERS = ("checkpoint", "checkpoints", "data", "model", "models", "runs")
"""Usual names of folders, which are not taken for an organisation of the hub."""


class ModelError(ConfigError):
    """A checkpoint or a model setting is not supported; the message names key, value and rule."""


@dataclass(frozen=True)
class RouterKind:
    """The scores of a router and its selection of experts; core's `moe_router_*` settings."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    """True: softmax over all experts, so that gate weights do not sum to 1; False: over the
    selected ones."""
    expert_bias: bool = False
    """True: a bias per expert is added to sigmoid scores for the selection, not to gate weights."""
    num_groups: int | None = None
    """Number of equal groups of experts; None: no groups."""
    group_topk: int | None = None
    """Number of groups from which experts are selected."""
    group_best: int = 2
    """Groups are ranked by the sum of the scores of this many of their best experts."""
    scaling_factor: float | None = None
    """Factor on gate weights."""

    def core_limits_groups(self, top_k: int) -> bool:
        """Return True if core's own group limit selects the same experts."""
        # core always ranks groups by their best top_k // group_topk experts
        return self.group_topk is not None and top_k // self.group_topk == self.group_best == 2


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings, with the names of config.json."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


QkNorm = Literal["none", "head", "vector"]
"""RMSNorm of queries and keys: over every head alone, or over all heads together."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes with which a client of a served model checks a response."""

    num_layers: int
    moe_layers: tuple[int, ...]
    """0-based global indices of the layers with experts, ascending; empty for a dense model."""
    top_k: int
    num_experts: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSizes):
    """The sizes and settings of a model; a size that it does not have is 0."""

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
    """Fraction of a head that is rotated."""
    yarn: Yarn | None = None
    shared_ffn_size: int = 0
    """MLP size of all shared experts together."""
    shared_gate: bool = False
    """True: a gate multiplies the output of the shared experts."""
    # multi-latent attention
    q_lora_rank: int = 0
    """Rank of compressed queries; 0: queries are not compressed."""
    kv_lora_rank: int = 0
    """Rank of compressed keys and values; > 0 for multi-latent attention."""
    qk_nope_dim: int = 0
    """Size of the part of a query or key head without position."""
    qk_rope_dim: int = 0
    """Size of the part of a query or key head with position."""
    v_head_dim: int = 0
    """Size of a value head."""
    mtp_layers: int = 0
    """Layers of multi-token prediction after the decoder in the checkpoint; they are neither
    trained nor exported."""

    @property
    def has_head_norms(self) -> bool:
        return self.qk_norm == "head"

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """Return the rows of the embedding: the vocabulary rounded up to a multiple of tp.

    Logits from vocab_size on are padding.
    """
    return -(-spec.vocab_size // tp) * tp


HARMLESS = {
    # names and versions
    *("_name_or_path", "architectures", "auto_map", "model_type", "name_or_path"),
    *("tokenizer_class", "transformers_version"),
    # how transformers runs the model
    *("_attn_implementation", "attn_implementation", "chunk_size_feed_forward", "dtype"),
    *("ep_size", "experts_implementation", "is_decoder", "is_encoder_decoder", "pretraining_tp"),
    *("torch_dtype", "use_cache", "use_flash_attn"),
    # inputs and outputs
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    # training from scratch
    *("aux_loss_alpha", "initializer_range", "router_aux_loss_coef", "seq_aux"),
    # without effect unless another key, which a reader checks, enables windows
    "max_window_layers",
}
"""Keys without effect on the forward pass.

RL uses no balancing losses, so their coefficients have no effect either.
"""


LEAST = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1),
    **dict.fromkeys(("num_hidden_layers", "vocab_size", "max_position_embeddings"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "num_experts_per_tok"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1),
    **dict.fromkeys(("decoder_sparse_step", "n_group", "topk_group", "kv_lora_rank"), 1),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "q_lora_rank"), 0),
    **dict.fromkeys(("n_shared_experts", "shared_expert_intermediate_size"), 0),
}
"""Key of a whole number -> its smallest value."""
NUMBERS = "rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor"
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(NUMBERS, ("a number", (int, float))),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("an object", (dict,))),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), ("a list", (list,))),
}
"""Key -> the kind of its value in messages, and its types."""


class ConfigReader:
    """A config.json that records which of its keys were read; call `finish` at the end."""

    def __init__(self, hf: HfConfig) -> None:
        self.hf = hf
        self._read: set[str] = set()

    def need(self, *keys: str) -> Any:
        """Return the value of the first of these keys that is present.

        Names differ between versions of transformers.  Raises ModelError where none is present.
        """
        self._read.update(keys)
        for key in keys:
            if self.hf.get(key) is not None:
                return self.checked(key, self.hf[key])
        raise ModelError(
            f"config.json: key {' or '.join(keys)} is missing; take the published config.json"
        )

    def get(self, key: str, default: object) -> Any:
        """Return the value of a key, or `default` where it is absent or null."""
        self._read.add(key)
        value = self.hf.get(key)
        return default if value is None else self.checked(key, value)

    def checked(self, key: str, value: Any) -> Any:
        """Return the value.  Raises ModelError for one of another type than the key's."""
        if key in LEAST:
            rule = f"a whole number of at least {LEAST[key]}"
            is_valid = type(value) is int and value >= LEAST[key]
        else:
            rule, kinds = KINDS.get(key, ("", ()))
            is_valid = not kinds or type(value) in kinds
        if not is_valid:
            raise ModelError(
                f"config.json {key} = {value!r:.80}: must be {rule}; take the published config.json"
            )
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the key is absent, null or has one of these values."""
        # an absent key, or null, stands for the first of them
        value = self.get(key, allowed[0])
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ModelError(
                f"config.json {key} = {value!r}: not supported for {self.architecture}, only"
                f" {names}"
            )

    def refuse(self, key: str, rule: str) -> ModelError:
        """Return the error for a value of `key` that breaks `rule`."""
        return ModelError(
            f"config.json {key} = {self.hf.get(key)!r}: not supported for {self.architecture},"
            f" {rule}"
        )

    @property
    def architecture(self) -> str:
        names = self.hf.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "(none)"

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
    """Return how to download ORG/NAME from the Hugging Face hub, where a path looks like one and
    there is no such folder; else "".
    """
    is_like_one = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and path.parent.name not in FOLDERS
    if path.parent.exists() or not is_like_one:
        return ""
    return (
        f"; nothing is downloaded: if it is a hub id, run `hf download {path}{options} --local-dir"
        " DIR` and name DIR"
    )


def load_hf_config(path: Path) -> HfConfig:
    """Return the content of a checkpoint directory's config.json.

    Raises ModelError where it cannot be read.
    """
    # not by transformers, whose attributes change between versions
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        what = "no config.json there" if Path(path).is_dir() else "no such folder"
        raise ModelError(
            f"model.path = {path}: {what}; give an HF checkpoint directory{hub_hint(Path(path))}"
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
