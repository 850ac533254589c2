"""Rehearse a training step of a configuration on pretended GPUs: the real engine at full size, on \
this machine's CPU.

    megatron-rl rehearse --config F.toml --gpus 64 [options] [--section.key value ...]

Reports what would fail or wait on a GPU, memory by the line that allocated it beside the plan's, \
and seconds computed from the
operations.  Nothing is measured on a GPU.  Two layers show all lines of the program; --whole has \
all layers.
Writes DIR/rehearsal.html, rehearsal.json and trace.json (Perfetto).
Exit status 0: nothing found; 1: errors, which the report names; 2: invalid arguments.
docs/guides/layout.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.options import positive
from megatron_rl_tools.options import add_gpu


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of `megatron-rl rehearse`, and the overrides --section.key VALUE."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="settings, as TOML")
    add("--gpus", type=positive, metavar="N", help="default: the fewest that the layout divides")
    add("--model", metavar="NAME|DIR", help="default: model.path; of a directory only config.json")
    add("--layers", type=positive, default=2, metavar="N", help="layers; default: %(default)s")
    add("--whole", action="store_true", help="all layers of the model")
    add(
        "--ranks",
        nargs="+",
        default=["roles"],
        metavar="RANK",
        help="roles: the first and last place on every axis, both turns in the ring of context"
        " ranks, the exporters of the first and last experts, in every stage (default); all; or"
        " numbers",
    )
    add(
        "--micro-batches",
        type=positive,
        metavar="N",
        help="of each update; default: stages of the pipeline + 1",
    )
    at_most = "of the longest sequences; default, and at most: what the configuration allows"
    add("--length", type=positive, metavar="TOKENS", help=at_most)
    add(
        "--turns",
        type=positive,
        metavar="N",
        help="of each sequence; default: agent.max_turns with agent.environment, else 1",
    )
    add(
        "--from-rollouts",
        type=Path,
        metavar="DIR",
        help="run directory whose saved rollouts are trained on, in place of invented ones",
    )
    add(
        "--skew",
        type=float,
        default=1.0,
        metavar="X",
        help="rows of the experts of the first expert rank, as a multiple of the mean",
    )
    add_gpu(parser)
    add("--out", type=Path, default=Path("runs/rehearsal"), metavar="DIR")
    args, overrides = parser.parse_known_args(argv)
    if args.from_rollouts and (args.length or args.turns):
        parser.error("--from-rollouts has its own lengths and turns: remove --length and --turns")
    if args.skew < 1:
        parser.error(f"--skew {args.skew}: it must be at least 1 (balanced)")
    if args.ranks not in (["roles"], ["all"]) and not all(rank.isdigit() for rank in args.ranks):
        parser.error(f"--ranks {' '.join(args.ranks)}: roles, all, or numbers of ranks")
    return args, overrides
