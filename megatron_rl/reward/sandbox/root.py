"""The files that a box shows, read-only: Python's standard library, the shared libraries that it
needs, and the commands that the caller names.

Names of files are {path in the box: path here}.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
INSIDE = "/programs"
"""The folder in the box that has the package of the programs."""
PACKAGE = "megatron_rl.reward.sandbox.programs"
PYTHON = "/python/bin/python3"
"""The interpreter in the box."""
SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
"""Folders of shared libraries of the system."""
COMMANDS = "/usr/bin"
"""The folder in the box that has the commands."""


@cache
def python_files() -> dict[str, str]:
    """Return {path in the box: path here} of this Python, without its venv and its packages."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library = os.path.dirname(os.__file__)
    # Python looks for its library beside its program, in lib or lib64
    files = {PYTHON: program, place_in_box(library): library}
    # an interpreter that links libpython
    folder, name = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
    if folder and name and os.path.exists(shared := os.path.join(folder, name)):
        files[f"/python/lib/{name}"] = shared
    return {target: os.path.realpath(source) for target, source in files.items()}


def place_in_box(path: str) -> str:
    """Return where a file of this Python is in the box; another file stays at its path."""
    prefix = f"{sys.base_prefix.rstrip('/')}/"
    is_python = path.startswith(prefix) and not path.startswith(SYSTEM)
    is_library = path == os.path.dirname(os.__file__)
    return f"/python/{path.removeprefix(prefix)}" if is_python or is_library else path


@cache
def shared_libraries(commands: tuple[str, ...] = ()) -> dict[str, str]:
    """Return {path in the box: path here} of the shared libraries of Python, of its modules and of
    the commands.

    Raises OSError where there is no ldd.
    """
    modules = Path(os.path.dirname(os.__file__), "lib-dynload").glob("*.so")
    files = [path for path in python_files().values() if os.path.isfile(path)]
    names = [*files, *map(str, modules), *command_files(commands).values()]
    output = subprocess.run(["ldd", *names], capture_output=True, text=True, check=False).stdout
    paths = dict.fromkeys(re.findall(r"(/\S+) \(0x[0-9a-f]+\)", output))
    return {place_in_box(path): os.path.realpath(path) for path in paths}


def command_files(commands: tuple[str, ...]) -> dict[str, str]:
    """Return {path in the box: path here} of those of the commands that this machine has."""
    paths = {name: shutil.which(name, path="/usr/bin:/bin") for name in commands}
    return {f"{COMMANDS}/{name}": os.path.realpath(path) for name, path in paths.items() if path}


def links(commands: tuple[str, ...] = ()) -> dict[str, str]:
    """Return {path in the box: target} of its symbolic links."""
    names = {"/tmp": "/box", "/dev/shm": "/box"}
    if commands:
        names |= {"/bin": COMMANDS}
        names |= {f"{COMMANDS}/{name}": PYTHON for name in ("python", "python3")}
    return names


@cache
def binds(commands: tuple[str, ...] = ()) -> dict[str, str]:
    """Return {path in the box: path here} of what a box shows, read-only."""
    names = {"/etc/ld.so.cache": "/etc/ld.so.cache"} if os.path.exists("/etc/ld.so.cache") else {}
    return (
        python_files()
        | shared_libraries(commands)
        | command_files(commands)
        | names
        | {f"{INSIDE}/{PACKAGE.replace('.', '/')}": str(PROGRAMS)}
    )


@cache
def hidden() -> list[str]:
    """Return the folders of a box that are empty there: packages that are installed here."""
    return [
        f"{target}/{name}"
        for target, source in python_files().items()
        for name in ("site-packages", "dist-packages")
        if os.path.isdir(f"{source}/{name}")
    ]


def parents(paths: Sequence[str]) -> list[str]:
    """Return the folders above the paths, each after those above it; the root is left out."""
    above = {str(folder) for path in paths for folder in Path(path).parents}
    return sorted(above - {"/"})
