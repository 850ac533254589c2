"""Names that one tensor has in different layers of megatron-core, as data.

They are names of parameters and keys of checkpoints.  TransformerEngine fuses a norm into the
linear layer after it; local layers (core 0.16.1 and 0.19.2) keep it separate, and core saves it
under its module's name.  Checkpoints are written under the names of TransformerEngine's layers
(`te_keys`) and read under either (`canonical`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["grouped attention", "latent attention", "dense MLP"]


class Norm(NamedTuple):
    """Names of a norm's weight, relative to its layer."""

    separate: str
    fused: str
    place: Place
    """The part of a layer where TransformerEngine fuses it."""
    canonical: str
    """The one of the two names that the weight tables (weights/hf/rules.py) have."""


_QKV = "self_attention.linear_qkv.layer_norm_weight"
_UP = "self_attention.linear_{}_up_proj.layer_norm_weight"
NORMS = (
    Norm("input_layernorm.weight", _QKV, "grouped attention", _QKV),
    Norm(
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "dense MLP",
        "pre_mlp_layernorm.weight",
    ),
    *(
        Norm(
            separate := f"self_attention.{part}_layernorm.weight",
            _UP.format(part),
            "latent attention",
            separate,
        )
        for part in ("q", "kv")
    ),
)


def canonical(name: str) -> str:
    """Return the name that this package uses for a parameter's name or a checkpoint's key.

    Both may be of TransformerEngine's or of local layers.  Keys of the optimizer end in the
    parameter's key.
    """
    for norm in NORMS:
        other = norm.separate if norm.canonical == norm.fused else norm.fused
        if name.endswith("." + other):
            return name.removesuffix(other) + norm.canonical
    return name


def spellings(name: str) -> tuple[str, ...]:
    """Return all names of a canonical one, which comes first."""
    for norm in NORMS:
        if name.endswith("." + norm.canonical):
            return name, *(
                name.removesuffix(norm.canonical) + other
                for other in (norm.separate, norm.fused)
                if other != norm.canonical
            )
    return (name,)


def te_keys(*, is_latent: bool, is_moe: bool) -> dict[str, str]:
    """Return prefix of a local layer's key -> core's prefix for TransformerEngine's layer.

    It is what core calls a keys_map.
    """
    places: set[Place] = {"latent attention" if is_latent else "grouped attention"}
    if not is_moe:
        places.add("dense MLP")
    return {
        norm.separate.removesuffix("weight"): norm.fused.removesuffix("weight")
        for norm in NORMS
        if norm.place in places
    }
