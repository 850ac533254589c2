"""The command `megatron-rl plan`: propose parallel layouts, fastest first.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config import Config, dump_config, load_rl_or_sft
from megatron_rl.config.rules.sft_rules import check_has_rollouts
from megatron_rl.models.fit import length_problems
from megatron_rl.models.known import find_spec
from megatron_rl.plan import grid
from megatron_rl.plan.hardware import GIB, Hardware, find_hardware, read_assumptions
from megatron_rl.plan.proposal import server_options, with_servers
from megatron_rl.plan.report_sections import gib
from megatron_rl.plan.search import Candidate, Search
from megatron_rl.plan.server_time import configured_servers
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl_tools.options import parse_plan
from megatron_rl_tools.rehearse.batch import rehearse_all

PAPER_STEP: dict[str, dict[str, object]] = {
    "data": {"train": "unused.jsonl", "max_prompt_tokens": 2048},
    "run": {"prompts_per_step": 64, "group_size": 16, "max_tokens_per_micro_batch": 36_864},
    "rollout": {"max_response_tokens": 32_768},
    "replay": {"mode": "R3"},
    "model": {"layer_spec": "transformer_engine"},
}


def main(argv: list[str] | None = None) -> int:
    args, overrides = parse_plan(argv)
    try:
        cfg = read_step_config(args, overrides)
        spec = find_spec(args.model)
        assumed = read_assumptions(args.assume)
        hardware = find_hardware(args.gpu)
        hardware = replace(
            hardware,
            per_node=args.gpus_per_node or hardware.per_node,
            memory=GIB * args.gpu_gib if args.gpu_gib else hardware.memory,
        )
        ranks = None if args.server_gpus else args.gpus
        devices = args.server_gpus or args.gpus
        cfg = with_servers(
            spec, cfg, devices, hardware, assumed, ranks=ranks, option="--server-gpus"
        )
        if problems := list(length_problems(cfg, spec)):
            raise ValueError("\n".join(problems))
        limit = memory_limit(hardware, args.reserve_gib)
    except ValueError as error:
        print(f"megatron-rl plan: {error}", file=sys.stderr)
        return 2
    trainer = TrainingModel(spec, cfg, args.gpus, hardware, assumed)
    search = Search(trainer, limit)
    layouts = search.candidates
    rows = grid.most_rows(cfg)
    print(
        f"{spec.architecture} on {args.gpus} x {hardware.name}, {rows:,} rows a micro-batch:"
        f" {len(layouts)} layouts fit in {gib(int(limit))}"
    )
    if not layouts:
        if search.refusals:
            # the first refusal of each kind: those that differ in numbers only are alike
            shown = {re.sub(r"\d+", "", text): text for text in reversed(search.refusals)}
            lines = ["refused, whatever the memory:", *reversed(shown.values())]
            print("\n".join(lines), file=sys.stderr)
        print(
            "none fits: try more GPUs, a smaller run.max_tokens_per_micro_batch,"
            " model.fused_lm_head = true, or, since replicas must divide the prompts, another"
            " run.prompts_per_step",
            file=sys.stderr,
        )
        return 1
    Console(width=140, highlight=False).print(layout_table(layouts[: args.top], args.gpus))
    try:
        print("\n".join(best_lines(trainer, layouts[0])))
    except ValueError as error:  # servers that the configuration names cannot hold the model
        print(f"megatron-rl plan: {error}", file=sys.stderr)
        return 2
    return rehearse_best(layouts[:5], args) if args.rehearse else 0


def memory_limit(hardware: Hardware, reserve_gib: float | None) -> float:
    """Return the bytes of a GPU that a layout may fill.  Raises ValueError where none are left."""
    reserve = hardware.reserve if reserve_gib is None else reserve_gib * GIB
    if reserve >= hardware.memory:
        raise ValueError(
            f"--reserve-gib {reserve / GIB:g}: it must be below the {hardware.memory / GIB:g} GiB"
            f" of {hardware.name} (--gpu-gib); give --reserve-gib a smaller number"
        )
    return hardware.memory - reserve


def rehearse_best(layouts: list[Candidate], args: argparse.Namespace) -> int:
    """Rehearse these layouts, print which survive, and return 1 where one does not."""
    options = ["--model", args.model, "--gpus", str(args.gpus), "--gpu", args.gpu]
    options += ["--gpu-gib", str(args.gpu_gib)] if args.gpu_gib else []
    with tempfile.TemporaryDirectory() as folder:
        configs = {}
        for number, layout in enumerate(layouts, 1):
            configs[f"layout_{number}"] = path = Path(folder) / f"{number}.toml"
            path.write_text(dump_config(layout.cfg))
        failed = list(rehearse_all(configs, options, Path("runs/rehearsal")))
    print(f"{len(layouts) - len(failed)} of {len(layouts)} layouts passed their rehearsal")
    return 1 if failed else 0


def read_step_config(args: argparse.Namespace, overrides: list[str]) -> Config:
    sections = {} if args.config else {name: dict(values) for name, values in PAPER_STEP.items()}
    sections.setdefault("model", {})["path"] = str(args.model)
    cfg = load_rl_or_sft(args.config, overrides, sections)
    check_has_rollouts(cfg, "plan")
    return cfg


def layout_table(layouts: list[Candidate], gpus: int) -> Table:
    kinds = ("weights", "gradients", "optimizer", "activations", "routes", "working", "total")
    out = Table(
        "tp", "cp", "pp", "ep", "etp", "dp", "recompute", *kinds, "old-logprob", "update", box=None
    )
    for layout in layouts:
        p, used = layout.cfg.parallel, layout.memory
        sizes = (p.tp, p.cp, p.pp, p.ep, p.expert_tp, grid.dp_size(p, gpus))
        seconds = (f"{layout.old_logprob.total:.1f} s", f"{layout.update.total:.1f} s")
        out.add_row(
            *map(str, sizes),
            layout.cfg.model.recompute + ", fused" * layout.cfg.model.fused_lm_head,
            *(gib(getattr(used, kind)) for kind in kinds),
            *seconds,
        )
    return out


def best_lines(trainer: TrainingModel, best: Candidate) -> list[str]:
    """Return the lines about the first layout: its step and its settings.

    Raises ValueError if its servers cannot hold the model.
    """
    server_pool = configured_servers(trainer.spec, best.cfg, trainer.hardware, trainer.assumed)
    times = replace(trainer, cfg=best.cfg).step(server_pool)
    p, sampling = best.cfg.parallel, times.rollout
    sizes = (("tp", p.tp), ("cp", p.cp), ("pp", p.pp), ("ep", p.ep), ("etp", p.expert_tp))
    head = " --model.fused_lm_head true" if best.cfg.model.fused_lm_head else ""
    stages = ""
    if p.layers_per_stage:
        stages = " ".join(map(str, ("", "--parallel.layers_per_stage", *p.layers_per_stage)))
    whose = "others than the trainer's"
    if best.cfg.rollout.release_memory:
        whose = "the trainer's, alternating with it"
    return [
        (
            f"first: {' '.join(f'--parallel.{name} {size}' for name, size in sizes)} "
            f"--model.recompute {best.cfg.model.recompute}{head}{stages}"
        ),
        (
            f"its step, computed: rollout {sampling.total:.0f} s, old-logprob"
            f" {times.old_logprob.total:.1f} s, update {times.update.total:.1f} s, weight sync"
            f" {times.weight_sync:.1f} s; {times.total:.0f} s in all"
        ),
        (
            f"servers: {server_pool.num} x {server_pool.devices} GPUs, {whose};"
            f" {sampling.slots:.0f} concurrent requests on each,"
            f" {sampling.tail / sampling.total:.0%} of the rollout with idle slots"
        ),
        f"their options: {server_options(best.cfg, server_pool, trainer.hardware.per_node)}",
        f"an update, by part: {times.update.largest()}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
