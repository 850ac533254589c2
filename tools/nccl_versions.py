"""NCCL versions of several Python environments; exit status 1 if they differ.

    python tools/nccl_versions.py python /opt/sglang/bin/python

Training ranks and servers form one NCCL communicator (rollout.weight_sync = "distributed"), and
NCCL refuses peers of another version.  torch.cuda.nccl.version() is what torch was compiled with;
here the library that torch calls is asked.
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
class Found:
    """Of one environment."""

    python: str
    torch: str
    nccl: str
    path: str


def main(argv: list[str] | None = None) -> int:
    """Print each environment's versions, then the remedy where they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "pythons",
        nargs="+",
        metavar="PYTHON",
        help="interpreters; the first is the training ranks'",
    )
    try:
        found = [probe(python) for python in parser.parse_args(argv).pythons]
    except RuntimeError as error:
        print(f"nccl_versions: {error}", file=sys.stderr)
        return 1
    for each in found:
        print(f"{each.python}: torch {each.torch}, NCCL {each.nccl} ({each.path})")
    problem = difference(found)
    if problem:
        print(f"nccl_versions: {problem}", file=sys.stderr)
    return 1 if problem else 0


def probe(python: str) -> Found:
    """Raises RuntimeError where torch with NCCL cannot be asked there."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"{python}: no version of NCCL: {reason}")
    return Found(python, **json.loads(done.stdout.splitlines()[-1]))


def difference(found: list[Found]) -> str:
    """The problem with its remedies, or "".  found: the training ranks' first."""
    trainer = found[0]
    others = [each for each in found[1:] if each.nccl != trainer.nccl]
    if not others:
        return ""
    lines = []
    for each in others:
        newer, older = sorted((trainer, each), key=lambda side: numbers(side.nccl), reverse=True)
        lines += [
            (
                f"{each.python} has NCCL {each.nccl}, {trainer.python} {trainer.nccl}: weight sync"
                " over NCCL needs equal versions"
            ),
            (
                f"  use {newer.nccl} for both: a torch runs with a newer NCCL than its own, but not"
                " with an older one"
            ),
        ]
        if older is each:
            package = f"nvidia-nccl-cu{cuda_major(each)}=={newer.nccl}"
            lines += [
                (
                    f"  1. {each.python} -m pip install --no-deps {package}  (image: --build-arg"
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


def preload(found: Found) -> str:
    """How its library is used by another process; a library that is part of torch itself cannot be."""
    path = found.path if found.path.startswith("/") else f"the libnccl.so of NCCL {found.nccl}"
    return f"LD_PRELOAD={path}"


def cuda_major(found: Found) -> str:
    """Of its torch; 13 where the version does not name it (PyPI's builds of torch 2.13)."""
    _, _, build = found.torch.partition("+cu")
    return build[:2] or "13"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    sys.exit(main())
