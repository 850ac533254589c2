"""Options of the commands that are one module: plan, play, replay-batch, make-tiny-model.

Imports no torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.options import positive
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl_tools.tiny_tasks import TASKS

PLAN = """Propose parallel layouts for a model and a number of GPUs, fastest first, by the \
computations of --dry-run.

    megatron-rl plan --gpus 64 --model CHECKPOINT_DIR|NAME [--gpu h100] [--gpu-gib 80] \
[--reserve-gib 8] [--gpus-per-node 8]
                         [--server-gpus 64] [--assume NAME=VALUE ...] [--top 8] \
[--config FILE.toml] [--section.key value ...]

NAME: olmoe-1b-7b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3 or kimi-k2; of a checkpoint only \
config.json is read.  Without --config
the step is that of the paper: 64 prompts x 16 responses of at most 32,768 tokens.  Memory and \
seconds are computed, not
measured (docs/design/cost_model.md); --assume changes their assumptions.
"""
PLAY = """Answer prompts, or play an agent's environment, in the model's place.

    megatron-rl play --config FILE.toml [--set NAME] [--first N] [--section.key value ...]

Prompts, agent and reward function are those of the configuration; no server is started, and of
model.path only the tokenizer and config.json are read.  You see the text as the model does, with
its special tokens, and write a turn; the reward follows (docs/guides/agents.md).
"""
REPLAY_BATCH = (
    "Compute a saved mini-batch again: loss, gradient and metrics (run.save_batches;"
    " docs/guides/mismatch.md)."
)
MAKE_TINY_MODEL = (
    "Makes a tiny Qwen3-MoE checkpoint that partly knows a task: a real model for a real RL run on"
    " any machine."
)


def parse_plan(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of `megatron-rl plan`, and the overrides --section.key VALUE."""
    parser = argparse.ArgumentParser(
        description=PLAN, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=positive, required=True, metavar="N", help="GPUs that train")
    add("--model", required=True, help="checkpoint directory, or a name as above")
    add_gpu(parser)
    add(
        "--reserve-gib",
        type=gib,
        metavar="GIB",
        help="for CUDA, nccl and fragments; default: 8, with --gpu cpu 0",
    )
    add("--gpus-per-node", type=positive, metavar="N", help="default: that of --gpu")
    add(
        "--server-gpus",
        type=positive,
        metavar="N",
        help="GPUs of all servers; default: as many as train",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an assumption of the times (plan/hardware.py)",
    )
    add(
        "--top",
        type=positive,
        default=8,
        metavar="N",
        help="layouts that are shown; default: %(default)s",
    )
    add("--config", type=Path, metavar="FILE", help="settings, as TOML: the step to plan for")
    add(
        "--rehearse",
        action="store_true",
        help="rehearse the five fastest layouts, with two layers (minutes)",
    )
    return parser.parse_known_args(argv)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which GPUs are planned for."""
    names = f"{', '.join(HARDWARE)}; default: %(default)s"
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=names)
    parser.add_argument(
        "--gpu-gib",
        type=gib_above_zero,
        metavar="GIB",
        help="memory of a GPU; default: that of --gpu",
    )


def gib(text: str) -> float:
    """Return a size in GiB.  Raises ArgumentTypeError unless it is a finite number, at least 0."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of GiB, got {text!r}")
    return size


def gib_above_zero(text: str) -> float:
    if not (size := gib(text)):
        raise argparse.ArgumentTypeError(f"must be a number of GiB above 0, got {text!r}")
    return size


def parse_play(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of `megatron-rl play`, and the overrides --section.key VALUE."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl play",
        description=PLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="settings, as TOML")
    add(
        "--set",
        default="train",
        metavar="NAME",
        help="train (default), a source of data.train, or an evaluation set",
    )
    add(
        "--first",
        type=positive,
        default=1,
        metavar="N",
        help="the set's prompt to start with, counted from 1; default: %(default)s",
    )
    return parser.parse_known_args(argv)


def parse_replay_batch(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl replay-batch", description=REPLAY_BATCH, allow_abbrev=False
    )
    parser.add_argument("bundle", type=Path, help="a folder of RUN/batches")
    parser.add_argument(
        "--layout", help="such as tp=2,ep=2 (the rest 1); default: the saved one, or one rank"
    )
    parser.add_argument(
        "--weights", type=Path, help="HF checkpoint of the policy, where the bundle has none"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        metavar="N",
        help="also show the N tokens with the largest loss",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative, in another layout; default 1e-3, 5e-2 for bfloat16",
    )
    return parser.parse_args(argv)


def parse_make_tiny_model(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=MAKE_TINY_MODEL)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--task", default="sums", choices=TASKS)
    for name, kind in (
        ("seed", int),
        ("target_accuracy", float),
        ("hidden_size", int),
        ("num_layers", int),
        ("num_experts", int),
        ("top_k", int),
        ("expert_size", int),
        ("head_dim", int),
        ("num_heldout", int),
        ("max_steps", int),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS)
    return parser.parse_args(argv)
