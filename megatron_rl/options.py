"""Options of `megatron-rl train` and `megatron-rl evaluate`.

Imports no torch: help and refusals take no seconds.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

TRAIN = (
    "Train.  On N ranks: megatron-rl launch --nproc_per_node N -m megatron_rl.train --config"
    " FILE.toml ..."
)
SFT = """Supervised training: -log pi of the assistant's tokens.  On N ranks: megatron-rl launch
--nproc_per_node N -m megatron_rl.sft --config FILE.toml ...
"""
EVALUATE = """Compute avg@n and pass@k on evaluation sets, through the client and the reward pool
of training.

    megatron-rl evaluate --checkpoint HF_DIR --sets NAME=FILE ... [--samples N] [--k K ...]
        [--section.key value ...]
    megatron-rl evaluate --run RUN_DIR [--section.key value ...]

The command starts SGLang servers on the checkpoint, or uses those of --rollout.urls, which must
serve that model.
"""


def parse(
    argv: list[str] | None = None, description: str = TRAIN
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of training, and all overrides --section.key VALUE, including those that
    options set.
    """
    from megatron_rl.config.arguments import split

    parser = make_parser(description)
    arguments, overrides = parser.parse_known_args(argv)
    for option in (option.partition("=")[0] for option, _ in split(overrides) if "." not in option):
        if near := difflib.get_close_matches(
            option, parser._option_string_actions, n=1, cutoff=0.75
        ):
            parser.error(f"unknown option {option}; did you mean {near[0]}?")
    if arguments.gpus and not arguments.dry_run:
        parser.error(
            f"--gpus {arguments.gpus} has no effect without --dry-run: torchrun sets the number of"
            " ranks"
        )
    if (arguments.gpu or arguments.assume) and not arguments.dry_run:
        parser.error(
            "--gpu and --assume have no effect without --dry-run: they change its computed times"
        )
    if arguments.only:
        overrides += ["--rollout.save_tensors"]
    if arguments.resume:
        overrides += ["--checkpoint.require"]
    if arguments.log_format:
        overrides += ["--run.log_format", arguments.log_format]
    return arguments, overrides


def make_parser(description: str) -> argparse.ArgumentParser:
    from megatron_rl.config.settings import section_lines

    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE.toml [OPTIONS] [--SECTION.KEY VALUE ...]",
        description=description,
        epilog=(
            "settings, in the file or as --SECTION.KEY VALUE; `megatron-rl settings SECTION[.KEY]`"
            f" explains them:\n{section_lines()}"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="settings, as TOML")
    add(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint of the run; there must be one",
    )
    add(
        "--log-format",
        choices=("text", "json"),
        help="lines on the terminal: text, or JSON for machines",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--only", choices=("rollout",), help="sample, score and save rollouts; train nothing"
    )
    kind.add_argument(
        "--from-rollouts",
        type=Path,
        metavar="DIR",
        help="train on the rollouts saved by the run in DIR",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check everything that can be checked here and print what the run will do",
    )
    add(
        "--gpus",
        type=positive,
        metavar="N",
        help="dry run: ranks (default: WORLD_SIZE, else the fewest that fit)",
    )
    add(
        "--gpu",
        metavar="NAME",
        help="dry run: hardware of its times, e.g. h100",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="dry run: an assumption of its times",
    )
    return parser


def parse_sft(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `megatron-rl sft`, and the overrides --section.key VALUE."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE.toml [--resume] [--SECTION.KEY VALUE ...]",
        description=SFT,
        epilog="docs/guides/sft.md; `megatron-rl settings SECTION[.KEY]` explains settings",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, as TOML")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint of the run; there must be one",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="lines on the terminal (run.log_format)"
    )
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.resume:
        overrides += ["--checkpoint.require"]
    if arguments.log_format:
        overrides += ["--run.log_format", arguments.log_format]
    return arguments, overrides


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def parse_evaluate(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `megatron-rl evaluate`, and the overrides --section.key VALUE."""
    parser = argparse.ArgumentParser(
        description=EVALUATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="HF_DIR", help="an HF checkpoint")
    source.add_argument(
        "--run",
        type=Path,
        metavar="RUN_DIR",
        help="a run: its exported model RUN_DIR/hf, its settings and sets",
    )
    add = parser.add_argument
    add(
        "--sets",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="evaluation sets, jsonl or parquet",
    )
    add("--samples", type=int, metavar="N", help="responses to each prompt: avg@N (eval.samples)")
    add(
        "--k",
        type=int,
        nargs="+",
        metavar="K",
        help="the k of pass@k, each at most N; N is always reported",
    )
    add("--config", type=Path, metavar="FILE", help="settings, as TOML")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="results and logs; default: RUN_DIR/evaluation, or runs/eval-NAME",
    )
    add("--log-format", choices=("text", "json"), help="lines on the terminal (run.log_format)")
    return parser.parse_known_args(argv)
