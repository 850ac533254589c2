"""Rules about low-rank adapters (config [lora])."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.base import ConfigError

SLOT_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""HF's names of the modules that servers have slots for (rollout.weight_sync = adapter)."""


def lora_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what adapters exclude."""
    if cfg.rollout.weight_sync == "adapter":
        yield from adapter_sync_problems(cfg)
    if not cfg.lora.rank:
        return
    if cfg.model.provider == "bridge":
        yield (
            f"lora.rank = {cfg.lora.rank} with model.provider = bridge: adapters are proven for the"
            " native provider only; set model.provider = native, or lora.rank = 0"
        )
    if cfg.megatron.is_on("gradient_accumulation_fusion"):
        yield (
            "megatron.gradient_accumulation_fusion = true with lora.rank > 0: core would add the"
            " gradient of a weight to a buffer that frozen weights do not have; set it to false"
        )
    if cfg.megatron.is_on("moe_shared_expert_overlap"):
        yield (
            "megatron.moe_shared_expert_overlap = true with lora.rank > 0: core would compute"
            " shared experts on another stream, in parts that were never compared with adapters;"
            " set it to false"
        )
    parallel = cfg.parallel
    if cfg.lora.shared_pairs and parallel.expert_tp not in (1, parallel.tp):
        yield (
            f"lora.shared_pairs = true with parallel.etp = {parallel.expert_tp} and tp ="
            f" {parallel.tp}: core reduces the gradient of a pair over ranks of one tensor rank,"
            " which would have other parts of the experts; set parallel.etp to 1 or to tp"
        )
    slots = [arg for arg in cfg.rollout.server_args if arg.startswith(("--lora", "--enable-lora"))]
    if slots:
        yield (
            f"rollout.server_args has {slots[0]} with lora.rank = {cfg.lora.rank}: servers get"
            " merged weights, to which a slot would add another adapter, and with"
            " rollout.weight_sync = adapter the run sets these options itself; remove it"
        )


def check_adapter_is_merged(cfg: AllSections, weights: Path, option: str) -> None:
    """Raise ConfigError where the weights of a command that loads no adapter are the base of
    lora.path.

    option: the command's name of `weights`.
    """
    if cfg.lora.path is not None and weights.resolve() == cfg.model.path.resolve():
        raise ConfigError(
            f"lora.path = {cfg.lora.path}: the run's weights are model.path = {cfg.model.path} with"
            " this adapter, and this command loads no adapter; name an HF checkpoint that has it"
            f" merged with {option}"
        )


def adapter_sync_problems(cfg: AllSections) -> Iterator[str]:
    """Yield why adapters alone cannot be sent to the servers."""
    setting, merged = "rollout.weight_sync = adapter", "set another rollout.weight_sync"
    if not cfg.lora.rank:
        yield f"{setting} with lora.rank = 0: no adapter is trained; set lora.rank, or {merged}"
    elif cfg.lora.targets != ("attention",):
        yield (
            f"{setting} needs lora.targets = ['attention'], got {list(cfg.lora.targets)}: SGLang"
            " 0.5.21 computes adapters of experts with kernels for GPUs alone, on which nothing was"
            f" run; {merged}, which sends merged weights"
        )
    if cfg.rollout.quantize != "none":
        yield (
            f"{setting} with rollout.quantize = {cfg.rollout.quantize}: merged weights are rounded"
            f" before they are sent, and servers of adapters keep the base; {merged}"
        )
