"""Refusals that need no GPU: the planner filters layouts by them; the dry run and the start of a
run raise them.

preflight.py checks the files and functions that a configuration names.  The answers of servers are
checked at the start of a run only.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.config.rules.server_gpus import check_count, check_overlap, most_on_a_rank
from megatron_rl.config.rules.server_rules import is_reachable
from megatron_rl.config.rules.teacher_servers import check_teacher_gpus
from megatron_rl.launch import nccl
from megatron_rl.models.experts import expert_settings, routing_settings
from megatron_rl.models.fit import check_fit, check_sizes, check_step, core_version
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.grid import dp_size, wants_te
from megatron_rl.plan.hardware import HARDWARE, Assumptions, Hardware
from megatron_rl.plan.host_memory import check_host_memory, host_bytes
from megatron_rl.plan.phases import Phase, check_phases, check_sync, phases
from megatron_rl.replay.compatibility import check_compatibility
from megatron_rl.weights.hf.targets import check_targets

ABOUT_TE = re.compile(r"\bTE\b|transformer.?engine|fused_permute", re.IGNORECASE)
"""Words by which core's refusals of what only TransformerEngine can do are recognised."""


@dataclass(frozen=True)
class Machine:
    """Rank 0's host, which starts the servers, and the assumptions of a plan."""

    hardware: Hardware
    ranks: int
    """Training ranks on the host."""
    gpus: int
    """GPUs of the host."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment of the ranks."""
    assumed: Assumptions = Assumptions()  # noqa: RUF009  (frozen)


def planned_machine(world: int, hardware: Hardware, assumed: Assumptions) -> Machine:
    """Return the host that a plan assumes: the GPUs of the hardware's row, with this process's
    CUDA_VISIBLE_DEVICES and LOCAL_WORLD_SIZE.
    """
    is_cpu = hardware.name == HARDWARE["cpu"].name
    visible = "" if is_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "")
    most = len(visible.split(",")) if visible else hardware.per_node
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or min(world, most)
    return Machine(hardware, ranks, hardware.per_node, assumed=assumed)


def check_layout(spec: ModelSpec, cfg: Config, world: int) -> None:
    """Raise ValueError, ModelError or ReplayIncompatible for a layout that no device can run, or
    adapters that the model cannot have.
    """
    check_sizes(cfg.parallel, world)
    check_fit(spec, cfg.model, cfg.parallel)
    check_targets(cfg.lora, spec)
    check_step(cfg, dp_size(cfg.parallel, world))
    check_replay(spec, cfg)
    # raises for limits that this pair of dtypes excludes; else the dtype is the servers' answer
    if not cfg.rollout.urls and cfg.rollout.dtype != "auto":
        parity_limits(cfg, cfg.rollout.dtype)


def check_leaders(cfg: Config, world: int, local_ranks: int) -> None:
    """Raise ConfigError where ranks that sample cannot reach the servers that rank 0 starts, as
    these listen for the ranks of its node only.

    local_ranks: training ranks of a node.
    """
    host, sizes = cfg.rollout.host, cfg.parallel
    starts_teachers = any(teacher.path for teacher in cfg.teachers.with_servers.values())
    # ranks are numbered tp-cp-dp-pp: the leader of the last replica, at tp 0, cp 0, pp 0
    last_leader = (dp_size(sizes, world) - 1) * sizes.tp * sizes.cp
    is_started = starts_teachers or not cfg.rollout.urls
    if not is_started or last_leader < local_ranks or is_reachable(host):
        return
    where = "path of [teachers]" if cfg.rollout.urls else "no rollout.urls"
    raise ConfigError(
        f"rollout.host = {host!r} and {where}, with {world} ranks, {local_ranks} of them on a node:"
        f" rank 0's node starts servers on that address, where rank {last_leader}, which samples on"
        " another node, finds its own machine; attach servers by urls (examples/launch/serve.sh),"
        " or set rollout.host to the address of rank 0's node, with rollout.api_key_env"
    )


def check_replay(spec: ModelSpec, cfg: Config, core: object | None = None) -> None:
    """Raise ReplayIncompatible if replay cannot be exact with core's settings.

    core: core's TransformerConfig; by default the settings that model and configuration define.
    """
    if core is None:
        settings: dict[str, object] = {
            "num_moe_experts": None,
            "bf16": cfg.model.dtype == "bfloat16",
        }
        core = SimpleNamespace(
            **settings | expert_settings(spec) | routing_settings(spec, cfg.model, te=False)
        )
    check_compatibility(
        core, mode=cfg.replay.mode, core_version=str(core_version()), measure=cfg.replay.measure
    )


def check_core(spec: ModelSpec, cfg: Config) -> list[str]:
    """Raise ValueError where core or replay refuses the fields of [megatron].

    Returns notes on what cannot be checked here.
    """
    if not cfg.megatron.fields:
        return []
    import torch  # torch and core take seconds, which dry runs without [megatron] save

    from megatron_rl.engine.core_fields import (
        check_fields,
        check_reference,
        check_released_memory,
    )
    from megatron_rl.engine.model import core_settings, make_transformer_config
    from megatron_rl.engine.optim import make_ddp_config, make_optimizer_config
    from megatron_rl.engine.provider import provider_of

    if provider_of(cfg.model) == "bridge":
        check_fields(cfg.megatron.fields)
        return [
            "[megatron], which Megatron-Bridge adds to its own settings: checked when the model is"
            " built"
        ]
    # False: the run would use TransformerEngine, so local layers are checked in its place
    is_certain = not wants_te(cfg) or importlib.util.find_spec("transformer_engine") is not None
    model = cfg.model if is_certain else cfg.model.model_copy(update={"layer_spec": "local"})
    device, fields = torch.device("cuda" if wants_te(cfg) else "cpu"), cfg.megatron.fields
    check_fields(fields, core_settings(spec, model, cfg.parallel, device), is_mla=spec.is_mla)
    if cfg.rollout.release_memory:
        check_released_memory(fields)
    if cfg.loss.kl_coef:
        check_reference(fields)
    try:
        core = make_transformer_config(spec, model, cfg.parallel, device, fields)
        make_ddp_config(cfg, overlap=cfg.overlaps_grad_reduce)
        make_optimizer_config(cfg)
    except ValueError as error:
        if is_certain or not ABOUT_TE.search(str(error)):
            raise
        return [f"[megatron], as TransformerEngine is not installed here: {error}"]
    check_replay(spec, cfg, core)
    return []


def check_gpus(
    spec: ModelSpec, cfg: Config, world: int, machine: Machine, *, has_servers: bool = True
) -> list[Phase]:
    """Raise ValueError for a run that cannot start on GPUs; return the memory of every phase."""
    shared = 0
    if has_servers:
        check_overlap(cfg.rollout, machine.ranks, machine.environ)
        check_count(cfg.rollout, machine.gpus, machine.environ)
        check_teacher_gpus(cfg, machine.ranks, machine.gpus, machine.environ)
        if not cfg.rollout.urls and cfg.rollout.weight_sync == "distributed":
            nccl.check_nccl_of_servers(cfg.rollout.server_args, machine.environ)
        shared = most_on_a_rank(cfg.rollout, machine.ranks, machine.environ)
    result = list(phases(spec, cfg, world, machine.hardware, machine.assumed, shared))
    if not has_servers:
        result = [phase for phase in result if phase.trainer]
    check_phases(cfg, result, machine.hardware)
    check_sync(cfg, result, machine.hardware)
    rank = host_bytes(spec, cfg, world, machine.ranks)
    check_host_memory(rank, machine.ranks, machine.hardware)
    return result
