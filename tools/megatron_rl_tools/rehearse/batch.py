"""Several rehearsals, one after another, each in a process of its own.

    python -m megatron_rl_tools.rehearse.batch --model NAME --gpus N CONFIG.toml ... [-- OPTIONS]

Prints one line for each and the lines of those with errors.  Exit status 1 where one has errors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG")
    parser.add_argument("--model", help="as of rehearse")
    parser.add_argument("--gpus", help="as of rehearse")
    parser.add_argument("--out", type=Path, default=Path("runs/rehearsal"))
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, options = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    options += ["--model", args.model] if args.model else []
    options += ["--gpus", args.gpus] if args.gpus else []
    configs = {f"{path.parent.name}/{path.stem}": path for path in args.configs}
    failed = list(rehearse_all(configs, options, args.out))
    return 1 if failed else 0


def rehearse_all(configs: Mapping[str, Path], options: Sequence[str], out: Path) -> Iterator[str]:
    """Rehearse each configuration, print its result, and yield the names of those with errors.

    configs: name -> its TOML file.  out: each report is in the folder of its name.
    """
    for name, path in configs.items():
        started = time.monotonic()
        command = [
            sys.executable, "-m", "megatron_rl.cli", "rehearse", "--config", str(path),
            "--out", str(out / name), *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        verdict = {0: "ok", 1: "ERRORS"}.get(done.returncode, "REFUSED")
        print(f"{verdict:8}{name} ({time.monotonic() - started:.0f} s)", flush=True)
        lines = done.stdout.splitlines() if done.returncode < 2 else done.stderr.splitlines()[-5:]
        print("\n".join(f"        {line}" for line in lines), flush=True)
        if done.returncode:
            yield name


if __name__ == "__main__":
    sys.exit(main())
