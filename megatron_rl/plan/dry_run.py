"""The dry run: a report of everything that a configuration implies, or every rule that it breaks.

It needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, ModelConfig, dump_config, load_rl_or_sft
from megatron_rl.config.rules.sft_rules import check_has_rollouts
from megatron_rl.models.families import make_spec
from megatron_rl.models.fit import length_problems
from megatron_rl.models.known import KNOWN, find_spec, is_known
from megatron_rl.models.spec import ModelError, ModelSpec, load_hf_config
from megatron_rl.plan import report_sections as sections
from megatron_rl.plan.grid import smallest_world
from megatron_rl.plan.hardware import (
    HARDWARE,
    Assumptions,
    Hardware,
    find_hardware,
    read_assumptions,
)
from megatron_rl.plan.preflight import check_files, resumed_step
from megatron_rl.plan.refusals import (
    Machine,
    check_core,
    check_gpus,
    check_layout,
    check_leaders,
    planned_machine,
)
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl.rollout.saved.saved_config import check_config
from megatron_rl.rollout.saved.saved_steps import SavedSteps

MEMORY_TITLE = (
    "Memory per rank, computed, at the largest micro-batch; without the framework, CUDA and nccl"
)
NO_FILES = (
    "model.path = {name}: published sizes, to plan with; a run needs a checkpoint there, and no"
    " file was checked"
)


def print_report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the report for the options of `train` (options.parse); return the exit status, which is
    2 where a run would be refused.
    """
    has_servers = arguments.from_rollouts is None
    try:
        cfg = load_rl_or_sft(arguments.config, overrides)
        check_has_rollouts(cfg, "dry-run")
        if not has_servers:
            check_config(arguments.from_rollouts, cfg)
        hardware = find_hardware(arguments.gpu) if arguments.gpu else None
        assumed = read_assumptions(arguments.assume)
        text = report(cfg, arguments.gpus, hardware, assumed, has_servers=has_servers)
        if not has_servers:
            first_step = resumed_step(cfg)
            SavedSteps(arguments.from_rollouts, cfg, planned_spec(cfg.model), first_step=first_step)
        print(text)
    except ValueError as error:
        print(f"megatron-rl dry-run: {error}", file=sys.stderr)
        return 2
    return 0


def report(
    cfg: Config,
    world_size: int | None = None,
    hardware: Hardware | None = None,
    assumed: Assumptions = Assumptions(),  # noqa: B008  (frozen)
    *,
    has_servers: bool = True,
) -> str:
    """Check `cfg` and return, as TOML with comments, what it will do on this hardware.

    world_size: number of ranks; by default WORLD_SIZE, else the fewest that the layout divides.
    hardware: by default an H100, or a CPU with run.device = cpu.
    has_servers: False for training on saved rollouts.
    Raises ValueError (ModelError for the model) for everything that the start of a run would
    refuse; the message names key, value, rule and fix.
    """
    is_name = is_known(cfg.model.path)
    spec = planned_spec(cfg.model)
    world = world_size or int(os.environ.get("WORLD_SIZE", "0")) or smallest_world(cfg.parallel)
    hardware = hardware or HARDWARE["cpu" if cfg.run.device == "cpu" else "h100"]
    check_layout(spec, cfg, world)
    not_checked = [NO_FILES.format(name=cfg.model.path)] if is_name else check_files(cfg, spec)
    if is_name and has_servers and (problems := list(length_problems(cfg, spec))):
        raise ValueError("\n".join(problems))
    not_checked += check_core(spec, cfg)
    machine = planned_machine(world, hardware, assumed)
    if has_servers:
        check_leaders(cfg, world, machine.ranks)
    in_phases, notes = gpu_notes(spec, cfg, world, machine, has_servers)
    trainer = TrainingModel(spec, cfg, world, hardware, assumed)
    texts: dict[str, Iterable[str]] = {
        "Model": sections.model_lines(spec),
        "Ranks": sections.rank_lines(spec, cfg, world, has_servers=has_servers),
        "One step": sections.step_lines(spec, cfg, world, hardware.per_node),
        "Routing": sections.routing_lines(cfg),
        "Servers": sections.server_lines(spec, cfg, assumed),
        "Not checked here": [*not_checked, *notes],
        MEMORY_TITLE: sections.memory_lines(spec, cfg, world, assumed),
    }
    if in_phases:
        texts[f"Memory of a GPU by phase, computed for {hardware.name}"] = in_phases
    time_title = f"Step time, computed for {hardware.name} (--gpu, --assume); not measured"
    texts[time_title] = sections.time_lines(trainer)
    comments: list[str] = []
    for title, lines in texts.items():
        comments += ["", title, *(f"  {line}" for line in lines)]
    return dump_config(cfg) + "\n".join(f"# {line}".rstrip() for line in comments)


def planned_spec(model: ModelConfig) -> ModelSpec:
    """Return the sizes of a checkpoint, or of a name to plan with."""
    return find_spec(model.path) if is_known(model.path) else model_spec(model)


def model_spec(model: ModelConfig) -> ModelSpec:
    """Return the sizes of a checkpoint; with model.provider = bridge Megatron-Bridge reads them."""
    if model.provider == "native":
        return make_spec(read_hf_config(model.path))
    from megatron_rl.engine.provider import provider_spec  # imports torch and core: seconds

    return provider_spec(model)


def read_hf_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json of a checkpoint directory.

    Raises ModelError; for a missing directory it lists the names to plan with.
    """
    try:
        return load_hf_config(path)
    except ModelError as error:
        if path.exists():
            raise
        raise ModelError(
            f"{error}; to plan with published sizes, --model.path {', '.join(KNOWN)}"
        ) from error


def gpu_notes(
    spec: ModelSpec, cfg: Config, world: int, machine: Machine, has_servers: bool
) -> tuple[list[str], list[str]]:
    """Return (lines about memory in every phase, notes on what is not checked).

    Raises ValueError for a run that cannot start on GPUs, if run.device = cuda.
    """
    if cfg.run.device == "cpu":
        return [], []
    try:
        phases = check_gpus(spec, cfg, world, machine, has_servers=has_servers)
    except ValueError as error:
        if cfg.run.device == "cuda":
            raise
        # auto: the run may start on a machine without GPUs
        return [], [f"run.device = auto: refused on a machine with GPUs: {error}"]
    return list(sections.phase_lines(phases, machine, spec, cfg, world)), []
