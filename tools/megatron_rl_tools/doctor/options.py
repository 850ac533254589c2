"""Reports what is installed on this machine, what is missing, and how to fix it.

    megatron-rl doctor [--config FILE] [--url http://HOST:PORT ...] [--quick | --build] [--json]
    # missing ranks, speed of their links
    torchrun --nnodes 2 --nproc_per_node 8 ... -m megatron_rl.cli doctor --ranks

One line per check: OK, WARN (works, with the limit named) or FAIL (does not work), with a remedy.
Exit status 1 if anything is FAIL.  Without --quick it starts two ranks that connect and one worker
that scores two answers, and writes a temporary file of up to half a GiB where a run would write.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--config", type=Path, help="also check that this configuration can run here"
    )
    parser.add_argument(
        "--url", action="append", default=[], help="also ask this SGLang server; may be repeated"
    )
    parser.add_argument("--api-key-env", help="environment variable with the servers' API key")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        help="seconds to wait for all ranks; default: %(default)g",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="start nothing and write nothing")
    kind.add_argument(
        "--build",
        action="store_true",
        help="an image is being built: a missing GPU is not a failure",
    )
    kind.add_argument(
        "--ranks", action="store_true", help="only connect ranks: those of torchrun, else two here"
    )
    return parser.parse_args(argv)
