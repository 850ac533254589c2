"""The packages an NGC PyTorch image is built around, as pip constraints, so that no requirement
replaces them.

    python tools/image_packages.py > constraints.txt         before pip install -c constraints.txt
    python tools/image_packages.py --same constraints.txt    afterwards: exit status 1 where one was replaced or has gone

Exit status 1, too, where one that the image must have is missing: then it is another image than the
Dockerfile is for. Needs nothing but Python: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

REQUIRED = ("torch", "triton", "transformer-engine", "apex")
FROZEN = re.compile(
    r"torch|torchvision|torchao|pytorch-triton|triton|transformer-engine.*|apex|flash-attn.*|nvidia-nccl.*"
)


def main(argv: list[str] | None = None) -> int:
    """Print the constraints, or compare with them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--same", type=Path, metavar="FILE", help="compare with what was printed before"
    )
    before = parser.parse_args(argv).same
    found = frozen(
        {distribution.name: distribution.version for distribution in metadata.distributions()}
    )
    if before is not None:
        return complain(differences(before.read_text().splitlines(), found))
    names = {line.partition("==")[0].removeprefix("pytorch-") for line in found}
    missing = [
        f"{name} is not installed: is this an NGC PyTorch image?"
        for name in REQUIRED
        if name not in names
    ]
    print("\n".join(found))
    return complain(missing)


def frozen(installed: dict[str, str]) -> list[str]:
    """Lines "name==version", sorted, of the packages among `installed` (name -> version) that must
    stay.
    """
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed.items()}
    return sorted(f"{name}=={version}" for name, version in names.items() if FROZEN.fullmatch(name))


def differences(before: list[str], after: list[str]) -> list[str]:
    """What was replaced, has gone or has come."""
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
