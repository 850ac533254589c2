"""Slots for low-rank adapters on the servers (rollout.weight_sync = adapter).

A slot holds the adapter of one version.  Tokens of a step may be max_staleness weight syncs old, so
requests in flight name at most as many further versions as the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import Config
from megatron_rl.config.device_limits import Device
from megatron_rl.config.rules.adapter_rules import SLOT_MODULES
from megatron_rl.rollout.server.server_info import ServerError, ServerInfo


def max_age(cfg: Config) -> int:
    """Return the most weight syncs between the newest adapter and one that a request in flight
    names, during a sync.
    """
    return cfg.rollout.max_staleness + 1


def slot_options(cfg: Config, device: Device) -> tuple[str, ...]:
    """Return the options of servers that the run starts."""
    if cfg.rollout.weight_sync != "adapter":
        return ()
    options = ["--enable-lora", "--max-lora-rank", str(cfg.lora.rank)]
    options += ["--lora-target-modules", *SLOT_MODULES]
    options += ["--max-loras-per-batch", str(1 + max_age(cfg))]
    if device == "cpu":
        options += ["--lora-backend", "torch_native"]
    return tuple(options)


def check_slots(info: ServerInfo, cfg: Config) -> None:
    """Raise ServerError where the server cannot hold the adapters of this run."""
    if cfg.rollout.weight_sync == "adapter" and (problems := list(slot_problems(info, cfg))):
        raise ServerError(
            f"SGLang server {info.url} cannot hold the adapters of rollout.weight_sync = adapter:"
            f" {'; '.join(problems)}; start it with {' '.join(slot_options(cfg, 'cuda'))}"
        )


def slot_problems(info: ServerInfo, cfg: Config) -> Iterator[str]:
    slots, num_slots = info.slots, 1 + max_age(cfg)
    if slots.enable_lora is not True:
        yield "enable_lora is off"
        return
    # with modules of experts it would compute all of them by other kernels
    if set(slots.lora_target_modules or ()) != set(SLOT_MODULES):
        yield f"lora_target_modules = {slots.lora_target_modules}: must be {list(SLOT_MODULES)}"
    for name, least in (
        ("max_lora_rank", cfg.lora.rank),
        ("max_loras_per_batch", num_slots),
        ("max_loaded_loras", num_slots + 1),  # a sync loads before it unloads
    ):
        value = getattr(slots, name)
        if value is not None and value < least:
            yield f"{name} = {value}: must be at least {least}"
