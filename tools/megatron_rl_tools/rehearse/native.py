"""The C++ part of the pretended GPU, which torch needs before it is imported.

torch's CPU build has no CUDA hooks and no device guard for CUDA.  pretended_cuda.cpp registers
both; it is compiled once for each version of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("pretended_cuda.cpp")
COMPILER = "CXX"
"""The variable that names another C++ compiler than g++."""


class RehearsalError(RuntimeError):
    """A rehearsal that cannot start, or a defect that ended one; the message is for users."""


def load() -> ctypes.CDLL:
    """Compile the library where that was not done, and load it.

    Call it before torch is imported.  Raises RehearsalError where torch is imported already, is a
    build with CUDA, or no compiler works.
    """
    if "torch" in sys.modules:
        raise RehearsalError("rehearse: torch was imported before the pretended GPU was loaded")
    version = importlib.metadata.version("torch")
    if "+cpu" not in version:
        raise RehearsalError(
            f"rehearse: torch {version} is built with CUDA, whose device a pretended one cannot"
            " replace; run it where torch is a CPU build, such as the environment of `make install`"
        )
    return ctypes.CDLL(str(library(version)))


def install_guard(library: ctypes.CDLL) -> None:
    """Give torch the pretended device guard; call it after torch was imported."""
    import torch

    torch._C._ensureCUDADeviceGuardSet()  # else torch puts one without events in its place later
    library.set_cuda_guard()


def library(version: str) -> Path:
    """Return the compiled library for this version of torch."""
    source = SOURCE.read_bytes()
    name = hashlib.sha256(source + version.encode() + sys.executable.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_rl"
    path = cache / f"pretended_cuda_{name}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        compile_library(path)
    return path


def compile_library(path: Path) -> None:
    """Compile pretended_cuda.cpp with torch's headers (some seconds).  Raises RehearsalError."""
    compiler = os.environ.get(COMPILER, "g++")
    if shutil.which(compiler) is None:
        raise RehearsalError(
            f"rehearse: needs a C++ compiler, and {compiler} is not on PATH; install it (Debian:"
            f" apt-get install g++) or name another one with {COMPILER}"
        )
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    part = path.with_suffix(f".{os.getpid()}.so")  # several rehearsals may start at once
    done = subprocess.run(
        [
            compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-D_GLIBCXX_USE_CXX11_ABI=1",
            f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", SOURCE,
            "-o", part, f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}",
            "-ltorch_cpu", "-lc10",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RehearsalError(
            f"rehearse: {compiler} could not compile {SOURCE.name} for this torch; it needs C++20:"
            f"\n{done.stderr[-2000:]}"
        )
    part.rename(path)
