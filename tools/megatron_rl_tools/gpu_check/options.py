"""Check what a first GPU must show, in the order in which a fault is found soonest.  Offline; on \
a CPU with --device cpu.

    megatron-rl gpu-check [--quick] [--out DIR] [--device cuda|cpu] [--steps NAME ...]
                          [--rehearsal DIR]

Each step is a process with a limit of minutes and ends with a verdict: passed, failed, or not
possible here.  A failed step does not stop the following ones.  Results: DIR/report.md,
DIR/results.json, and a log of each step in DIR/steps.  Those of an earlier call get a number
(report_1.md); the folder of a step that runs again is replaced.
Exit status 0: no step failed; 1: one did; 2: invalid arguments.  docs/guides/launch.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_rl_tools.gpu_check.steps import STEPS

IMAGE_SERVERS = Path("/opt/sglang/bin/python")
"""The servers' interpreter in the project's image (Dockerfile)."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small models and fewer combinations")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpu_check"),
        metavar="DIR",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the same steps as far as possible",
    )
    names = [step.name for step in STEPS]
    parser.add_argument(
        "--steps", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}"
    )
    servers = IMAGE_SERVERS if IMAGE_SERVERS.exists() else Path(sys.executable)
    parser.add_argument(
        "--server-python",
        type=Path,
        default=servers,
        help="an interpreter that has SGLang; default: %(default)s",
    )
    parser.add_argument(
        "--rehearsal",
        type=Path,
        metavar="DIR",
        help="of `megatron-rl rehearse`: its step is run on the GPUs and compared (full-layout)",
    )
    args = parser.parse_args(argv)
    if args.rehearsal is not None and not (args.rehearsal / "rehearsal.json").is_file():
        parser.error(
            f"--rehearsal {args.rehearsal}: no rehearsal.json there; give --out of `megatron-rl"
            " rehearse`"
        )
    if not args.server_python.exists():
        parser.error(
            f"--server-python {args.server_python}: no such file; name the interpreter that has"
            " SGLang"
        )
    return args
