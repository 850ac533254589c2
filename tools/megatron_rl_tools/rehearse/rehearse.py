"""The command `megatron-rl rehearse`; options.py parses its arguments.

A process of its own imports torch with the pretended GPU, and forks the virtual ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl_tools.rehearse import native
from megatron_rl_tools.rehearse.options import parse

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.models.spec import ModelSpec
    from megatron_rl.plan.hardware import Hardware
    from megatron_rl.records.packed import Sample
    from megatron_rl_tools.rehearse.device import PretendedGpu


def main() -> int:
    args, overrides = parse()
    try:
        return rehearse(args, overrides)
    except (ValueError, native.RehearsalError) as error:
        print(f"megatron-rl rehearse: {error}", file=sys.stderr)
        return 2


def rehearse(args: argparse.Namespace, overrides: list[str]) -> int:
    """Rehearse, write the report and print its summary; return the exit status."""
    library = native.load()

    native.install_guard(library)
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(args, overrides, Path(folder))
        return rehearse_on(make_gpu(job.hardware, job.cfg.model.layer_spec), args, job)


def rehearse_on(gpu: PretendedGpu, args: argparse.Namespace, job: Job) -> int:
    """Do what `rehearse` does, on the pretended GPU of this process."""
    import torch

    started = time.monotonic()
    results = run(gpu, args, job)
    print(
        f"{len(job.ranks)} of {job.world_size} ranks rehearsed in {time.monotonic() - started:.0f}"
        f" s with torch {torch.__version__}",
        flush=True,
    )
    from megatron_rl_tools.rehearse.report import write_report

    hf_config = json.loads((job.cfg.model.path / "config.json").read_text())
    return write_report(results, job.spec, job.cfg, args, job.world_size, job.hardware, hf_config)


@dataclass(frozen=True)
class Job:
    """What is rehearsed."""

    cfg: Config
    spec: ModelSpec
    """Sizes of the rehearsed model, which may have fewer layers than the whole one."""
    whole: tuple[Config, ModelSpec]
    """The configuration and sizes of the whole model."""
    world_size: int
    ranks: Sequence[int]
    hardware: Hardware


def prepare(args: argparse.Namespace, overrides: list[str], folder: Path) -> Job:
    """Return what the options ask for, with the config.json of the rehearsed model in `folder`.

    Raises ValueError for what a run would refuse.
    """
    from megatron_rl.config import load_rl_or_sft
    from megatron_rl.config.rules.sft_rules import check_has_rollouts
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.spec import load_hf_config
    from megatron_rl.plan.grid import smallest_world
    from megatron_rl.plan.hardware import GIB, find_hardware
    from megatron_rl.plan.refusals import check_layout
    from megatron_rl_tools.rehearse.layout import (
        check_provider,
        model_config,
        rank_roles,
        smallest_layers,
        write_model,
    )

    hardware = find_hardware(args.gpu)
    if args.gpu_gib:
        hardware = replace(hardware, memory=GIB * args.gpu_gib)
    named = ["--model.path", str(args.model)] if args.model else []
    cfg = load_rl_or_sft(args.config, [*overrides, *named, "--run.device", "cuda"])
    check_has_rollouts(cfg, "rehearse")
    wanted = None if args.whole else smallest_layers(cfg.parallel, args.layers)
    hf_config = model_config(cfg.model.path)
    check_provider(cfg.model.provider, hf_config)
    whole = (cfg, make_spec(hf_config))
    write_model(hf_config, folder, wanted)
    args.turns = args.turns or (cfg.agent.max_turns if cfg.agent.environment else 1)
    # virtual ranks have no rollouts to share
    parallel = cfg.parallel.model_copy(update={"share_host_memory": False})
    if not args.whole:  # its layers per stage are those of the whole model
        default = type(parallel)().layers_per_stage
        parallel = parallel.model_copy(update={"layers_per_stage": default})
    model = cfg.model.model_copy(update={"path": folder})
    cfg = cfg.model_copy(update={"model": model, "parallel": parallel})
    world_size = args.gpus or smallest_world(cfg.parallel)
    spec = make_spec(load_hf_config(folder))
    check_layout(spec, cfg, world_size)
    if args.ranks == ["roles"]:
        ranks = rank_roles(cfg.parallel, world_size)
    elif args.ranks == ["all"]:
        ranks = list(range(world_size))
    else:
        ranks = sorted({int(rank) for rank in args.ranks})
        if ranks[-1] >= world_size:
            raise ValueError(f"--ranks {ranks[-1]}: must be below --gpus = {world_size}")
    return Job(cfg, spec, whole, world_size, ranks, hardware)


def make_gpu(hardware: Hardware, layer_spec: str) -> PretendedGpu:
    """Make the pretended GPU and TransformerEngine's stand-in.

    Call it once, before megatron-core is imported, which looks for both.
    """
    from megatron_rl_tools.rehearse import compiled, layers
    from megatron_rl_tools.rehearse.device import PretendedGpu
    from megatron_rl_tools.rehearse.recorder import Recorder

    gpu = PretendedGpu(Recorder(), int(hardware.memory))
    compiled.install(gpu)
    if layer_spec != "local":
        layers.install(gpu.recorder)
    return gpu


def run(gpu: PretendedGpu, args: argparse.Namespace, job: Job) -> dict[int, Any] | str:
    """Return rank -> its RankReport or RankFailed, or the text of a disagreement."""
    from megatron_rl_tools.rehearse import core_hooks
    from megatron_rl_tools.rehearse.program import Program, Rehearsal
    from megatron_rl_tools.rehearse.ranks import run_ranks
    from megatron_rl_tools.rehearse.switchboard import Disagreement

    core_hooks.install(gpu, args.skew)
    program = Program(Rehearsal(job.cfg, make_samples(args, job)))
    try:
        return run_ranks(job.ranks, job.world_size, program, gpu)
    except Disagreement as error:
        return str(error)


def make_samples(args: argparse.Namespace, job: Job) -> list[Sample]:
    """Return the rollouts that every replica trains on.  Raises ValueError for saved ones that do
    not fit the configuration.
    """
    from megatron_rl.plan.grid import dp_size
    from megatron_rl_tools.rehearse.rollouts import (
        invented_samples,
        saved_samples,
        sequence_lengths,
    )

    cfg, micro_batches = job.cfg, args.micro_batches or job.cfg.parallel.pp + 1
    if args.from_rollouts:
        whole_cfg, whole_spec = job.whole
        replicas, num_layers = dp_size(cfg.parallel, job.world_size), len(job.spec.moe_layers)
        return saved_samples(
            args.from_rollouts, whole_spec, whole_cfg, num_layers, replicas, micro_batches
        )
    lengths = sequence_lengths(cfg, micro_batches, args.length)
    return invented_samples(job.spec, cfg, lengths, args.turns)
