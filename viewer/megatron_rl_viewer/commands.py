"""The commands of this package, entry points of the group megatron_rl.commands
(megatron_rl/commands.py).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec


def start(module: str) -> int:
    """Run the command of a module and return its exit status, or 2 if megatron_rl is missing."""
    if find_spec("megatron_rl") is None:
        print(f"{sys.argv[0]}: needs megatron_rl; in a checkout: pip install .", file=sys.stderr)
        return 2
    return import_module(f"megatron_rl_viewer.{module}").main() or 0


def report() -> int:
    """Write the report of a run, or a comparison of several."""
    return start("report_command")


def view() -> int:
    """Look at runs and each token of their rollouts in a browser."""
    return start("view_command")
