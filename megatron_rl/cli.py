"""The arguments of train.py, and --dry-run, which needs no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_rl.config import ConfigError, load_config
from megatron_rl.plan.hardware import find_hardware, read_assumptions
from megatron_rl.plan.report import report


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Arguments, and the overrides --section.key value among them."""
    parser = argparse.ArgumentParser(prog="megatron_rl.train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpus", type=int, help="ranks that --dry-run plans for; default: WORLD_SIZE, else as few as fit")
    parser.add_argument("--gpu", help="hardware that --dry-run computes times for: a row of megatron_rl/plan/hardware.py")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="changes what its times rest on")
    parser.add_argument("--resume", action="store_true")
    split_run = parser.add_mutually_exclusive_group()
    split_run.add_argument("--only", choices=("rollout",))
    split_run.add_argument("--from-rollouts", type=Path, metavar="DIR")
    return parser.parse_known_args(argv)


def dry_run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the resolved configuration as TOML, and as comments what it implies.  Exit status 2: it would be refused."""
    try:
        cfg = load_config(arguments.config, overrides)
        hardware = find_hardware(arguments.gpu) if arguments.gpu else None
        print(report(cfg, arguments.gpus, hardware, read_assumptions(arguments.assume)))
    except (ConfigError, ValueError) as error:
        print(f"megatron_rl.train: {error}", file=sys.stderr)
        return 2
    return 0
