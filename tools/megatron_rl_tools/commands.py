"""The commands of this package, entry points of the group megatron_rl.commands
(megatron_rl/commands.py).

The first line of a docstring is the command's help.  A command's options are parsed before its
module is imported, which may import torch, so that `--help` and refused options are fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

INSTALL = {"megatron_rl": ".", "megatron_rl_viewer": "./viewer"}
"""Package -> what `pip install` needs for it in a checkout."""


def start(options: str, target: str, *needs: str) -> int:
    """Parse the options, run the command and return its exit status, or 2 if a package that it
    needs is missing.

    options, target: "module:function" of this package; both read sys.argv.
    """
    missing = [INSTALL[name] for name in needs if find_spec(name) is None]
    if missing:
        print(
            f"{sys.argv[0]}: needs {' and '.join(needs)}; in a checkout: pip install"
            f" {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    for place in (options, target):
        module, _, function = place.partition(":")
        status = getattr(import_module(f"megatron_rl_tools.{module}"), function)()
    return status or 0


def check_rollouts() -> int:
    """Check the saved rollouts of a run, of verl and slime too."""
    return start("check_rollouts.options:parse", "check_rollouts.check_rollouts:main")


def convert() -> int:
    """Convert an HF checkpoint to a Megatron distributed checkpoint, or back."""
    return start("convert.options:parse", "convert.convert_hf:main", "megatron_rl")


def doctor() -> int:
    """Check this machine, its packages and servers."""
    return start("doctor.options:parse", "doctor.doctor:main", "megatron_rl")


def explain_mismatch() -> int:
    """Find out why trainer and server disagree, and since when."""
    return start(
        "explain_mismatch.options:parse",
        "explain_mismatch.explain_mismatch:main",
        "megatron_rl",
        "megatron_rl_viewer",
    )


def gpu_check() -> int:
    """Check what a first GPU must show, step by step."""
    return start(
        "gpu_check.options:parse", "gpu_check.gpu_check:main", "megatron_rl", "megatron_rl_viewer"
    )


def make_tiny_model() -> int:
    """Make the tiny MoE checkpoint of the demo."""
    return start("options:parse_make_tiny_model", "make_tiny_moe:main", "megatron_rl")


def plan() -> int:
    """Propose parallel layouts for a model and a number of GPUs."""
    return start("options:parse_plan", "plan_layouts:main", "megatron_rl")


def play() -> int:
    """Answer prompts, or play an environment, in the model's place."""
    return start("options:parse_play", "play:main", "megatron_rl")


def quantize() -> int:
    """Quantize or dequantize an HF checkpoint."""
    return start("quantize.options:parse", "quantize.quantize_hf:main", "megatron_rl")


def rehearse() -> int:
    """Rehearse a step of a configuration on pretended GPUs, at full size."""
    return start(
        "rehearse.options:parse", "rehearse.rehearse:main", "megatron_rl", "megatron_rl_viewer"
    )


def replay_batch() -> int:
    """Compute a saved mini-batch again, in any layout."""
    return start("options:parse_replay_batch", "replay_batch:main", "megatron_rl")


def top() -> int:
    """Show what every rank and server of a run does now."""
    return start("top.options:parse", "top.top:main", "megatron_rl")


def trace() -> int:
    """Show where a traced step spent its time, for Perfetto."""
    return start(
        "trace.options:parse", "trace.merge_trace:main", "megatron_rl", "megatron_rl_viewer"
    )


def verify_replay() -> int:
    """Prove routing replay in a layout."""
    return start("verify_replay.options:parse", "verify_replay.verify_replay:main", "megatron_rl")
