"""Show where one step of a run spent its time, per rank and server (run.trace).

  megatron-rl trace RUN                     the latest step that was traced: a table, and one \
file for ui.perfetto.dev
  megatron-rl trace RUN --step 30           another step
  megatron-rl trace RUN --picture step.png  also as a picture; .svg, .pdf by the name

The ranks' files are merged from disk, with the GPUs' (torch.profiler) where the ranks have some.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, runs/NAME")
    parser.add_argument(
        "--step", type=int, metavar="N", help="a step that was traced (default: the latest)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the merged trace (default: RUN/trace/STEP.json.gz)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a picture of the step")
    return parser.parse_args(argv)
