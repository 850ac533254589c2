"""Prove routing replay in a parallel layout: real megatron-core, each token with its own route.

    megatron-rl verify-replay                                      one rank, a small random MoE
    torchrun --nproc_per_node 4 -m megatron_rl.cli verify-replay --tp 2 --cp 2       a layout
    torchrun --nproc_per_node 8 -m megatron_rl.cli verify-replay --model my.toml --shrink
(a) every router consumed the given routes, each once in every pass; (b) a recorded pass, replayed,
is equal bit by bit; (c) log-probs, loss and gradients equal those of one rank (float32).
Exit code: 0 passed, 1 failed, 2 invalid arguments.  docs/guides/mismatch.md explains the output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.models.known import KNOWN, is_known

FORMATS = {"thd": "packed (thd)", "bshd": "padded (bshd)"}
FAULTS = ("offset", "layer", "order", "stale", "duplicate", "pad")
"""Faults of the replayed routes, which faults.py injects."""
EPISODE_FAULTS = ("turn", "mask", "retokenise", "forward")
"""Faults of an episode's requests, which episodes.py injects."""
KINDS = ("softmax", "pre-softmax", "sigmoid", "softmax-groups", "sigmoid-groups")
"""Kinds of routers: of Qwen3-MoE and Mixtral; of Qwen2-MoE; of Moonlight, GLM-4.5 and Kimi-K2; of
DeepSeek-V2; of DeepSeek-V3.
"""
SIZES = ("tp", "pp", "vp", "cp", "ep", "etp")
OF_RANDOM_MODEL = {"num_layers": None, "experts": 32, "topk": 4, "first_k_dense": 0}
"""Options of the small random model -> their defaults; none has an effect with --model."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl verify-replay",
        usage="%(prog)s [options]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=40, width=120
        ),
    )
    add_model_options(parser.add_argument)
    add_pass_options(parser.add_argument)
    args = parser.parse_args(arguments)
    check_options_of_model(parser, args)
    check_options_of_proof(parser, args)
    return args


def add_model_options(add: Callable[..., object]) -> None:
    """Add the options of the model and its layout."""
    text = "HF directory, its config.json, a TOML file, or a name that plan knows"
    add("--model", type=Path, metavar="MODEL", help=text)
    text = "keep the model's layout-relevant shape, cut the rest; random weights"
    add("--shrink", action="store_true", help=text)
    text = "of the random model, as the next three; default: 4, or those of --layers-per-stage"
    add("--num-layers", type=int, metavar="N", help=text)
    for name in ("experts", "topk", "first_k_dense"):
        text = f"default: {OF_RANDOM_MODEL[name]}"
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    for name in SIZES:
        text = "default: the TOML's, else " + ("tp" if name == "etp" else "1")
        add(f"--{name}", type=int, help=text)
    text = "layers of each of pp x vp stages; default: equal"
    add("--layers-per-stage", type=stages_of, metavar="2,2,3", help=text)


def add_pass_options(add: Callable[..., object]) -> None:
    """Add the options of the passes, the faults and the output."""
    text = "per data-parallel replica; with --vp a multiple of --pp"
    add("--micro-batches", type=int, default=2, metavar="N", help=text)
    parts = "none, full, block, selective"
    text = f"{parts}; default: the TOML's, else none"
    add("--recompute", choices=parts.split(", "), metavar="PARTS", help=text)
    parts = "alltoall, allgather"
    text = f"{parts}; default: the TOML's, else alltoall"
    add("--dispatcher", choices=parts.split(", "), metavar="KIND", help=text)
    add("--router", choices=KINDS, metavar="KIND", help=f"{', '.join(KINDS)}; default: the model's")
    add("--mode", choices=("R2", "R3"), default="R3")
    add("--format", choices=FORMATS, help="packed or padded batches; default: the TOML's, else thd")
    faults = (*FAULTS, *EPISODE_FAULTS)
    text = f"must fail: {', '.join(faults)}"
    add("--break", choices=faults, dest="fault", metavar="FAULT", help=text)
    text = "turns of every rollout: requests, and between them an environment's tokens"
    add("--turns", type=int, default=1, metavar="N", help=text)
    text = "leave (c) out, for a model that does not fit one rank"
    add("--no-reference", action="store_true", help=text)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0, metavar="N")
    add("--timeout-minutes", type=float, default=5.0, metavar="M")
    add("--json", action="store_true", help="one JSON object instead of the table")


def check_options_of_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set the sizes of the random model; end with an error for options without an effect."""
    sizes = [name for name in OF_RANDOM_MODEL if getattr(args, name) is not None]
    if args.model is not None and sizes:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sizes)
        parser.error(
            f"--model {args.model}: no effect of {names}, as the model has its sizes (--shrink"
            " keeps its experts, and as many layers as the stages need or --layers-per-stage"
            " holds); leave out what is named"
        )
    if args.model is None and args.shrink:
        parser.error("--shrink has no effect without --model: the random model is small")
    for name, default in OF_RANDOM_MODEL.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def check_options_of_proof(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error for arguments that exclude one another."""
    if args.micro_batches < 1:
        parser.error(f"--micro-batches {args.micro_batches}: at least 1")
    if args.turns < 1:
        parser.error(f"--turns {args.turns}: at least 1")
    if args.fault in EPISODE_FAULTS and args.turns < 2:
        parser.error(f"--break {args.fault} needs an episode of several turns: add --turns 3")
    if args.fault == "forward" and args.mode == "R2":
        parser.error(
            "--break forward has no effect with --mode R2, which does not use the rollouts' routes;"
            " use --mode R3"
        )
    if args.model is not None and is_known(args.model):
        if not args.shrink:
            parser.error(
                f"--model {args.model}: add --shrink: its complete weights would have to be written"
                " here"
            )
    elif args.model is not None and not args.model.exists():
        parser.error(
            f"--model {args.model}: no such file or directory, nor one of {', '.join(KNOWN)}"
        )
    if args.model is None and not 0 <= args.first_k_dense < num_layers(args):
        parser.error(
            f"--first-k-dense {args.first_k_dense}: must leave one of {num_layers(args)} layers"
            " with experts"
        )
    if args.model is None and not 1 <= args.topk < args.experts:
        parser.error(f"--topk {args.topk}: must be in 1..{args.experts - 1}, below --experts")


def stages_of(text: str) -> tuple[int, ...]:
    """Parse "2,2,3" as (2, 2, 3)."""
    return tuple(int(count) for count in text.split(","))


def num_layers(args: argparse.Namespace) -> int:
    """Return the small random model's layers: --num-layers, else those of all stages, else 4."""
    return args.num_layers or sum(args.layers_per_stage or ()) or 4
