"""NCCL versions of several Python environments; exit status 1 if they differ.

    python tools/nccl_versions.py python /opt/sglang/bin/python

Training ranks and servers form one NCCL communicator (rollout.weight_sync = "distributed"), and
NCCL refuses peers of another version.  torch.cuda.nccl.version() is the version that torch was
compiled with; here the library that torch calls is asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass

PROBE = """
import ctypes, json, os, torch
def version(path):
    number = ctypes.c_int(0)
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
try:  # what torch calls: with LD_PRELOAD two libraries are loaded
    nccl = version(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
except (AttributeError, OSError):  # linked statically, or not at all
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
with open("/proc/self/maps") as maps:
    loaded = sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
path = next((each for each in loaded if version(each) == nccl), "inside torch")
print(json.dumps({"torch": torch.__version__, "nccl": nccl, "path": path}))
"""


@dataclass(frozen=True)
class NcclEnvironment:
    """The versions of a Python environment."""

    python: str
    torch: str
    nccl: str
    path: str


def main(argv: list[str] | None = None) -> int:
    """Print the versions of all environments, then the remedy if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "pythons",
        nargs="+",
        metavar="PYTHON",
        help="interpreters; the first is the training ranks'",
    )
    try:
        sides = [probe(python) for python in parser.parse_args(argv).pythons]
    except RuntimeError as error:
        print(f"nccl_versions: {error}", file=sys.stderr)
        return 1
    for side in sides:
        print(f"{side.python}: torch {side.torch}, NCCL {side.nccl} ({side.path})")
    problem = difference(sides)
    if problem:
        print(f"nccl_versions: {problem}", file=sys.stderr)
    return 1 if problem else 0


def probe(python: str) -> NcclEnvironment:
    """Ask an interpreter for its versions.  Raises RuntimeError if it has no torch with NCCL."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"{python}: no version of NCCL: {reason}")
    return NcclEnvironment(python, **json.loads(done.stdout.splitlines()[-1]))


def difference(environments: list[NcclEnvironment]) -> str:
    """Return the problem with its remedies, or "".  environments: that of training ranks first."""
    trainer = environments[0]
    others = [other for other in environments[1:] if other.nccl != trainer.nccl]
    if not others:
        return ""
    lines = []
    for other in others:
        newer, older = sorted((trainer, other), key=lambda side: numbers(side.nccl), reverse=True)
        lines += [
            (
                f"{other.python} has NCCL {other.nccl}, {trainer.python} {trainer.nccl}:"
                " weight sync over NCCL needs equal versions"
            ),
            (
                f"  use {newer.nccl} for both: a torch runs with a newer NCCL than its own, but not"
                " with an older one"
            ),
        ]
        if older is other:
            package = f"nvidia-nccl-cu{cuda_major(other)}=={newer.nccl}"
            lines += [
                (
                    f"  1. {other.python} -m pip install --no-deps {package}  (image: --build-arg"
                    f" SERVER_NCCL={package})"
                ),
                f"  2. where the package index lacks it: {preload(newer)} for the servers",
            ]
        else:
            lines += [
                f"  1. {preload(newer)} for the training ranks",
                f"  2. or an image with NCCL {newer.nccl}: --build-arg NGC_TAG=...",
            ]
    lines.append(
        '  or no NCCL between them: rollout.weight_sync = "disk"  (image: --build-arg CHECK_NCCL=0)'
    )
    return "\n".join(lines)


def preload(side: NcclEnvironment) -> str:
    """Return the setting with which another process uses this environment's NCCL library."""
    path = side.path if side.path.startswith("/") else f"the libnccl.so of NCCL {side.nccl}"
    return f"LD_PRELOAD={path}"


def cuda_major(side: NcclEnvironment) -> str:
    """Return the CUDA version of its torch; 13 if torch does not name it (PyPI's torch 2.13)."""
    _, _, build = side.torch.partition("+cu")
    return build[:2] or "13"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    sys.exit(main())
