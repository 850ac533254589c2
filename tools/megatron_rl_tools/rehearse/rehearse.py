"""The command `megatron-rl rehearse`; options.py parses its arguments.

A process of its own imports torch with the pretended GPU, and forks the virtual ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl_tools.rehearse import native
from megatron_rl_tools.rehearse.options import parse

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.models.spec import ModelSpec
    from megatron_rl.plan.hardware import Hardware


def main() -> int:
    args, overrides = parse()
    try:
        return rehearse(args, overrides)
    except (ValueError, native.RehearsalError) as error:
        print(f"megatron-rl rehearse: {error}", file=sys.stderr)
        return 2


def rehearse(args: argparse.Namespace, overrides: list[str]) -> int:
    """Rehearse, write the report and print its summary; return the exit status."""
    from megatron_rl.plan.hardware import find_hardware

    hardware = find_hardware(args.gpu)
    library = native.load()
    import torch

    native.install_guard(library)
    with tempfile.TemporaryDirectory() as folder:
        cfg, spec, world_size, ranks = prepare(args, overrides, Path(folder))
        started = time.monotonic()
        hf_config = json.loads((Path(folder) / "config.json").read_text())
        results = run(args, cfg, world_size, ranks, hardware)
        print(
            f"{len(ranks)} of {world_size} ranks rehearsed in {time.monotonic() - started:.0f} s"
            f" with torch {torch.__version__}",
            flush=True,
        )
    from megatron_rl_tools.rehearse.report import write_report

    return write_report(results, spec, cfg, args, world_size, hardware, hf_config)


def prepare(
    args: argparse.Namespace, overrides: list[str], folder: Path
) -> tuple[Config, ModelSpec, int, list[int]]:
    """Return (configuration, sizes of the rehearsed model, number of ranks, ranks to rehearse).

    Raises ValueError for what a run would refuse.
    """
    from megatron_rl.config import load_config
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.spec import load_hf_config
    from megatron_rl.plan.grid import smallest_world
    from megatron_rl.plan.refusals import check_layout
    from megatron_rl_tools.rehearse.layout import rank_roles, smallest_layers, write_model

    named = ["--model.path", str(args.model)] if args.model else []
    cfg = load_config(args.config, [*overrides, *named, "--run.device", "cuda"])
    wanted = None if args.whole else smallest_layers(cfg.parallel, args.layers)
    write_model(cfg.model.path, folder, wanted)
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
    return cfg, spec, world_size, ranks


def run(
    args: argparse.Namespace, cfg: Config, world_size: int, ranks: list[int], hardware: Hardware
) -> dict[int, Any] | str:
    """Return rank -> its RankReport or RankFailed, or the text of a disagreement."""
    from megatron_rl_tools.rehearse.device import PretendedGpu
    from megatron_rl_tools.rehearse.recorder import Recorder

    gpu = PretendedGpu(Recorder(), int(hardware.memory))
    from megatron_rl_tools.rehearse import compiled, core_hooks, layers

    # before megatron-core is imported, which looks for TransformerEngine and for CUDA
    compiled.install(gpu)
    if cfg.model.layer_spec != "local":
        layers.install(gpu.recorder)
    from megatron_rl_tools.rehearse.program import Program, Rehearsal
    from megatron_rl_tools.rehearse.ranks import run_ranks
    from megatron_rl_tools.rehearse.switchboard import Disagreement

    core_hooks.install(gpu, args.skew)
    micro_batches = args.micro_batches or cfg.parallel.pp + 1
    program = Program(Rehearsal(cfg, micro_batches, args.length))
    try:
        return run_ranks(ranks, world_size, program, gpu)
    except Disagreement as error:
        return str(error)
