"""The packages a base image is built around, as pip constraints, so that no requirement \
replaces them.

    # before pip install -c constraints.txt
    python tools/image_packages.py > constraints.txt
    # afterwards: exit status 1 if one was replaced or removed
    python tools/image_packages.py --same constraints.txt

Exit status 1 also if a package is missing that the image must have: then the Dockerfile is for
another image.  It needs only Python, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

REQUIRED = ("torch", "triton", "transformer-engine", "apex")
FROZEN = re.compile(
    r"torch|torchvision|torchao|pytorch-triton|triton|transformer-engine.*|apex|flash-attn.*"
    r"|nvidia-nccl.*|sglang|sgl-kernel|flashinfer.*"
)


def main(argv: list[str] | None = None) -> int:
    """Print the constraints, or compare with them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    text = "compare with what was printed before"
    parser.add_argument("--same", type=Path, metavar="FILE", help=text)
    text = "packages that this image need not have"
    parser.add_argument("--absent", nargs="+", choices=REQUIRED, default=(), help=text)
    args = parser.parse_args(argv)
    before = args.same
    lines = frozen({package.name: package.version for package in metadata.distributions()})
    if before is not None:
        return complain(differences(before.read_text().splitlines(), lines))
    names = {line.partition("==")[0].removeprefix("pytorch-") for line in lines}
    missing = [
        f"{name} is not installed: is this the Dockerfile's base image?"
        for name in REQUIRED
        if name not in names and name not in args.absent
    ]
    print("\n".join(lines))
    return complain(missing)


def frozen(installed: dict[str, str]) -> list[str]:
    """Return sorted lines "name==version" of the packages among `installed` (name -> version) that
    must not be replaced.
    """
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed.items()}
    return sorted(f"{name}=={version}" for name, version in names.items() if FROZEN.fullmatch(name))


def differences(before: list[str], after: list[str]) -> list[str]:
    """Return a line for each package that was replaced, removed or added."""
    changed = sorted({*before} ^ {*after})
    return [
        f"{line}: {'was replaced or removed' if line in before else 'is installed now'}"
        for line in changed
    ]


def complain(problems: list[str]) -> int:
    for problem in problems:
        print(f"image_packages: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
