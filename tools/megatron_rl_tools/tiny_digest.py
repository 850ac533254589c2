"""One digest of all that the tiny model's bytes depend on: a model that is kept is never stale."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("numpy", "tokenizers", "torch", "transformers")
CPUINFO = Path("/proc/cpuinfo")


def digest_of(settings: Mapping[str, object]) -> str:
    """Return the digest of the settings, the code that makes the model, the versions of the
    packages that compute it, and the processor, whose kernels round in their own way.
    """
    depends_on = {"settings": settings, **surroundings()}
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


@cache
def surroundings() -> dict[str, object]:
    folder = Path(__file__).parent
    sources = [folder / "make_tiny_moe.py", *sorted(folder.glob("tiny_*"))]
    return {
        "code": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources},
        "packages": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "processor": processor(),
    }


def processor() -> str:
    """Return the name of the processor, or of its kind where the system does not tell."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
