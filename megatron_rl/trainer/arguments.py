"""The arguments of train.py, and --dry-run, which needs no torch."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.hardware import find_hardware, read_assumptions
from megatron_rl.rollout.saved_run import check_config


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Arguments, and the overrides --section.key value among them, with those that arguments stand for."""
    parser = argparse.ArgumentParser(prog="megatron_rl.train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--gpus", type=positive, help="ranks that --dry-run plans for; default: WORLD_SIZE, else as few as fit"
    )
    parser.add_argument(
        "--gpu", help="hardware that --dry-run computes times for: a row of megatron_rl/plan/hardware.py"
    )
    parser.add_argument(
        "--assume", action="append", default=[], metavar="NAME=VALUE", help="changes what its times rest on"
    )
    parser.add_argument("--resume", action="store_true")
    split_run = parser.add_mutually_exclusive_group()
    split_run.add_argument("--only", choices=("rollout",))
    split_run.add_argument("--from-rollouts", type=Path, metavar="DIR")
    arguments, overrides = parser.parse_known_args(argv)
    for option in (each.partition("=")[0] for each in overrides if each.startswith("--") and "." not in each):
        if near := difflib.get_close_matches(option, parser._option_string_actions, n=1, cutoff=0.75):
            parser.error(f"{option} is no option; did you mean {near[0]}?")
    if arguments.gpus and not arguments.dry_run:
        parser.error(f"--gpus {arguments.gpus} has no effect without --dry-run: torchrun says how many ranks there are")
    if (arguments.gpu or arguments.assume) and not arguments.dry_run:
        parser.error("--gpu and --assume have no effect without --dry-run, whose times they are for")
    if arguments.only:
        overrides += ["--rollout.save_tensors"]
    if arguments.resume:
        overrides += ["--checkpoint.require"]
    return arguments, overrides


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs, rule: at least 1")
    return int(text)


def dry_run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the resolved configuration as TOML, and as comments what it implies.  Exit status 2: it would be refused."""
    try:
        cfg = load_config(arguments.config, overrides)
        if arguments.from_rollouts is not None:
            check_config(arguments.from_rollouts, cfg)
        hardware = find_hardware(arguments.gpu) if arguments.gpu else None
        print(report(cfg, arguments.gpus, hardware, read_assumptions(arguments.assume)))
    except ValueError as error:
        print(f"megatron_rl.train: {error}", file=sys.stderr)
        return 2
    return 0
