"""Options of `megatron-rl new`.  Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.options import positive

NEW = """Make a project of your own from a recipe: config.toml, reward.py or agent.py, prepare.py, \
run.sh and a README.md
with the next commands.

    megatron-rl new --list
    megatron-rl new DIR --recipe NAME [--model CHECKPOINT_DIR|NAME] [--gpus 8] [--gpu h100]
                                      [--lora [RANK]]

--model and --gpus fill in the fastest layout that fits, as `megatron-rl plan` computes it; without
them the project is for Qwen3-30B-A3B on one node of 8 H100.
"""

RANK = 16
"""Rank of the adapters where --lora has no value."""


def parse_new(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl new",
        description=NEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="DIR", help="folder to make; new or empty")
    add("--recipe", metavar="NAME", help="one of --list")
    add("--list", action="store_true", help="list the recipes")
    add("--model", help="checkpoint directory, or a name such as qwen3-30b-a3b")
    add("--gpus", type=positive, metavar="N", help="GPUs that train; default: 8")
    add("--gpu", default="h100", metavar="NAME", help="kind of GPU; default: %(default)s")
    add("--lora", nargs="?", type=positive, const=RANK, metavar="RANK",
        help="train adapters of this rank (%(const)s) instead of every weight")  # fmt: skip
    args = parser.parse_args(argv)
    if not args.list and not (args.folder and args.recipe):
        parser.error("needs DIR and --recipe NAME; --list shows the recipes")
    return args
