"""Every refusal that needs no GPU, in one place: the planner filters by it, the dry run and the
start-up raise it.

Files and functions that a configuration names are checked in preflight.py; what a server answers,
at the start only.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from megatron_rl.config import Config
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.config.rules.server_gpus import check_count, check_overlap, most_on_a_rank
from megatron_rl.launch import nccl
from megatron_rl.models.experts import expert_settings, routing_settings
from megatron_rl.models.fit import check_fit, check_sizes, check_step, core_version
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.grid import dp_size
from megatron_rl.plan.hardware import Assumptions, Hardware
from megatron_rl.plan.memory import wants_te
from megatron_rl.plan.phases import Phase, check_phases, phases
from megatron_rl.replay.compatibility import check_compatibility

ABOUT_TE = re.compile(r"\bTE\b|transformer.?engine|fused_permute", re.IGNORECASE)
"""In core's refusals of what only TransformerEngine can do."""


@dataclass(frozen=True)
class Machine:
    """What refusals depend on beside the configuration.

    ranks: training ranks on rank 0's host, which starts the servers; environ: theirs; gpus: of that
    host.
    """

    hardware: Hardware
    ranks: int
    gpus: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    assumed: Assumptions = Assumptions()  # noqa: RUF009  (frozen)


def planned_machine(world: int, hardware: Hardware, assumed: Assumptions) -> Machine:
    """The host that a plan assumes: its GPUs are those of the hardware's row, CUDA_VISIBLE_DEVICES
    and LOCAL_WORLD_SIZE ours.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    most = len(visible.split(",")) if visible else hardware.per_node
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or min(world, most)
    return Machine(hardware, ranks, hardware.per_node, assumed=assumed)


def check_layout(spec: ModelSpec, cfg: Config, world: int) -> None:
    """Raise ValueError (ModelError for the model, ReplayIncompatible) for what no device can run."""
    check_sizes(cfg.parallel, world)
    check_fit(spec, cfg.model, cfg.parallel)
    check_step(cfg, dp_size(cfg.parallel, world))
    check_replay(spec, cfg)
    if not cfg.rollout.urls and cfg.rollout.dtype != "auto":  # else the server's answer decides
        parity_limits(cfg, cfg.rollout.dtype)


def check_replay(spec: ModelSpec, cfg: Config, core: object | None = None) -> None:
    """Raise ReplayIncompatible if replay cannot be exact with the settings that model and
    configuration give core.

    core: its TransformerConfig, where there is one.
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
    """Raise ValueError where core refuses [megatron], or replay does; returns what cannot be
    checked without TransformerEngine."""
    if not cfg.megatron.fields:
        return []
    import torch  # with core seconds, which other dry runs save

    from megatron_rl.engine.core_fields import check_fields, check_released_memory
    from megatron_rl.engine.model import core_settings, make_transformer_config
    from megatron_rl.engine.optim import make_ddp_config, make_optimizer_config
    from megatron_rl.engine.provider import provider_of

    if provider_of(cfg.model) == "bridge":
        check_fields(cfg.megatron.fields)
        return [
            "[megatron], which Megatron-Bridge adds to its own settings: checked when the model is"
            " built"
        ]
    is_certain = not wants_te(cfg) or importlib.util.find_spec("transformer_engine") is not None
    model = cfg.model if is_certain else cfg.model.model_copy(update={"layer_spec": "local"})
    device, fields = torch.device("cuda" if wants_te(cfg) else "cpu"), cfg.megatron.fields
    check_fields(fields, core_settings(spec, model, cfg.parallel, device), is_mla=spec.is_mla)
    if cfg.rollout.release_memory:
        check_released_memory(fields)
    try:
        core = make_transformer_config(spec, model, cfg.parallel, device, fields)
        make_ddp_config(cfg)
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
    """Raise ValueError for what cannot start on GPUs; returns the memory of each phase."""
    shared = 0
    if has_servers:
        check_overlap(cfg.rollout, machine.ranks, machine.environ)
        check_count(cfg.rollout, machine.gpus, machine.environ)
        if not cfg.rollout.urls:
            nccl.check_nccl_of_servers(cfg.rollout.server_args, machine.environ)
        shared = most_on_a_rank(cfg.rollout, machine.ranks, machine.environ)
    found = list(phases(spec, cfg, world, machine.hardware, machine.assumed, shared))
    if not has_servers:
        found = [phase for phase in found if phase.trainer]
    check_phases(found, machine.hardware)
    return found
