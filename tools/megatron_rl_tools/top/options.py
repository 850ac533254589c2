"""Show what every rank and server of a run does now: its stage, the seconds in it, tokens/s, \
queue, memory.

  megatron-rl top RUN             refreshed until Ctrl-C; into a pipe once, as plain text
  megatron-rl top RUN --once      once

Ranks are as of their last heartbeat, which rank 0 writes into RUN/status.json every two seconds;
servers are asked directly.  For a run that has ended, or was killed, it shows when and where.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, runs/NAME")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--every-rank", action="store_true", help="one line per rank also where there are many"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="time between refreshes (default: 2)",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help=(
            "environment variable with the API key of the servers (rollout.api_key_env); it is sent"
            " to those that RUN names"
        ),
    )
    return parser.parse_args(argv)
