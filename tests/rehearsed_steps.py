"""Rehearsals of small models, one after another, for tests/e2e/test_rehearse.py.

    python -m tests.rehearsed_steps FOLDER LAYER_SPEC < CASES

CASES: JSON, name -> options of `megatron-rl rehearse`.  Each case is a process forked from this
one, which imports torch and megatron-core once.  The report is in FOLDER/NAME, and what the command
prints in FOLDER/NAME.txt; prints as JSON name -> exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from megatron_rl_tools.rehearse import native


def main() -> int:
    folder, layer_spec = Path(sys.argv[1]), sys.argv[2]
    cases = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    library = native.load()
    import torch.distributed  # noqa: F401

    native.install_guard(library)
    from megatron_rl.plan.hardware import HARDWARE
    from megatron_rl_tools.rehearse.rehearse import make_gpu

    gpu = make_gpu(HARDWARE["h100"], layer_spec)
    import megatron_rl_tools.rehearse.program
    import megatron_rl_tools.rehearse.report  # noqa: F401

    print(json.dumps({name: run(gpu, folder, name, cases[name]) for name in cases}))
    return 0


def run(gpu: Any, folder: Path, name: str, options: list[str]) -> int:
    """Rehearse in a process of its own; return its exit status."""
    if (child := os.fork()) == 0:
        status = 3
        try:
            with (folder / f"{name}.txt").open("w") as output:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                status = rehearse(gpu, folder / name, options)
                sys.stdout.flush()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rehearse(gpu: Any, out: Path, options: list[str]) -> int:
    from megatron_rl_tools.rehearse import rehearse as command
    from megatron_rl_tools.rehearse.options import parse

    args, overrides = parse(["--out", str(out), *options])
    model = out.with_name(f"{out.name}_model")
    return command.rehearse_on(gpu, args, command.prepare(args, overrides, model))


if __name__ == "__main__":
    sys.exit(main())
