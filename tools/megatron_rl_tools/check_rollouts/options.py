"""Checks whether tokens, log-probs and expert ids of a run's saved rollouts belong together.

    megatron-rl check-rollouts runs/NAME [--model DIR [--step N] [--sample 8]] [--format NAME] \
[--json]

Reads rollouts and their side files (rollout.save_tensors = true), or the dumps of slime,
miles and verl, a file or a folder; what their content does not allow to check is printed.  With
--model the canary runs too: a forward of that checkpoint on sampled rollouts must choose the
recorded experts, best at shift 0.  Pass the checkpoint that sampled the step: for the first step
the run's model.path.  Exit status 0: no findings; 1: findings; 2: no rollouts could be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("megatron_rl", "slime", "miles", "verl")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, metavar="PATH", help="run directory, or dump of another trainer"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of the rollouts; by default found from the files"
    )
    parser.add_argument(
        "--model", type=Path, help="HF checkpoint: its sizes, and the canary's forward"
    )
    parser.add_argument(
        "--step", type=int, help="check this step only; the canary's default is the first step"
    )
    parser.add_argument(
        "--sample", type=int, default=8, help="rollouts that the canary runs through the model"
    )
    parser.add_argument("--seed", type=int, default=0, help="which rollouts the canary takes")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the canary's forward",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    arguments = parser.parse_args(argv)
    if arguments.sample < 1:
        parser.error(f"--sample {arguments.sample}: must be at least 1")
    return arguments
