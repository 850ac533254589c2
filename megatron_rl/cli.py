"""The command `megatron-rl`.  Imports nothing heavy until a command needs it.

    megatron-rl COMMAND [...]        megatron-rl COMMAND --help

Every command is also `python -m` its module (COMMANDS), which is what torchrun starts.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.options import parse

BAD_ARGUMENTS = 2


@dataclass(frozen=True)
class Command:
    """target: module:function, which reads sys.argv and returns an exit status (or None for 0).

    options: module:function that parses sys.argv, of a target that imports torch: it ends --help and wrong options before that.
    """

    target: str
    help: str
    options: str = ""


COMMANDS = {
    "train": Command("megatron_rl.cli:train", "train in this process; on several ranks: launch"),
    "launch": Command("megatron_rl.launch.__main__:main", "torchrun that keeps the ranks' exit statuses"),
    "dry-run": Command("megatron_rl.cli:dry_run", "check a configuration and print what the run will do"),
    "settings": Command("megatron_rl.cli:settings", "explain the settings of a configuration"),
    "evaluate": Command(
        "megatron_rl.evaluate:main",
        "avg@n and pass@k of a checkpoint or a run",
        "megatron_rl.options:parse_evaluate",
    ),
    "plan": Command(
        "megatron_rl.tools.plan_layouts:main",
        "propose parallel layouts for a model and a number of GPUs",
        "megatron_rl.tools.options:parse_plan",
    ),
    "doctor": Command(
        "megatron_rl.tools.doctor.doctor:main",
        "check this machine, its packages and servers",
        "megatron_rl.tools.doctor.options:parse",
    ),
    "convert": Command(
        "megatron_rl.tools.convert.convert_hf:main",
        "HF checkpoint <-> Megatron distributed checkpoint",
        "megatron_rl.tools.convert.options:parse",
    ),
    "quantize": Command(
        "megatron_rl.tools.quantize.quantize_hf:main",
        "quantize or dequantize an HF checkpoint",
        "megatron_rl.tools.quantize.options:parse",
    ),
    "verify-replay": Command(
        "megatron_rl.tools.verify_replay.verify_replay:main",
        "prove routing replay in a layout",
        "megatron_rl.tools.verify_replay.options:parse",
    ),
    "replay-batch": Command(
        "megatron_rl.tools.replay_batch:main",
        "compute a saved mini-batch again, in any layout",
        "megatron_rl.tools.options:parse_replay_batch",
    ),
    "explain-mismatch": Command(
        "megatron_rl.tools.explain_mismatch.explain_mismatch:main",
        "why trainer and server disagree, and since when",
        "megatron_rl.tools.explain_mismatch.options:parse",
    ),
    "gpu-check": Command(
        "megatron_rl.tools.gpu_check.gpu_check:main",
        "check what a first GPU must show, step by step",
        "megatron_rl.tools.gpu_check.options:parse",
    ),
    "check-rollouts": Command(
        "megatron_rl.tools.check_rollouts.check_rollouts:main",
        "check the saved rollouts of a run",
        "megatron_rl.tools.check_rollouts.options:parse",
    ),
    "view": Command("megatron_rl.viewer.command:main", "look at runs and each token of their rollouts in a browser"),
    "report": Command("megatron_rl.tools.plot_run:main", "report of a run, or a comparison of several"),
    "top": Command(
        "megatron_rl.tools.top.top:main",
        "what every rank and server of a run does now",
        "megatron_rl.tools.top.options:parse",
    ),
    "trace": Command(
        "megatron_rl.tools.trace.trace:main",
        "where a traced step spent its time, for Perfetto",
        "megatron_rl.tools.trace.options:parse",
    ),
    "make-tiny-model": Command(
        "megatron_rl.tools.make_tiny_moe:main",
        "make the tiny MoE checkpoint of the demo",
        "megatron_rl.tools.options:parse_make_tiny_model",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status, 2 for an unknown command."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(import_module("megatron_rl").__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"megatron-rl: unknown command {name!r}; {hint}", file=sys.stderr)
        return BAD_ARGUMENTS
    sys.argv = [f"megatron-rl {name}", *arguments]  # argparse takes the program's name from it
    if options := COMMANDS[name].options:
        load(options)()
    return load(COMMANDS[name].target)() or 0


def load(place: str) -> Callable[[], Any]:
    """The function of module:function."""
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(
        [
            "usage: megatron-rl COMMAND ...",
            "",
            *(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()),
            "",
            "megatron-rl COMMAND --help describes one.  N ranks: megatron-rl launch --nproc_per_node N -m megatron_rl.train ...",
        ]
    )


# Training -----------------------------------------------------------------------------------------------------------

CHECK = "Check a configuration and print what the run will do.  Starts nothing, needs no GPU; the options are those of train."


def train() -> int:
    """`megatron-rl train`: the help, refused options and --dry-run come before the imports that take seconds."""
    arguments, overrides = parse()
    if arguments.dry_run:
        return report_plan(arguments, overrides)
    return import_module("megatron_rl.train").main()


def dry_run() -> int:
    """`megatron-rl dry-run`."""
    return report_plan(*parse(["--dry-run", *sys.argv[1:]], CHECK))


def report_plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the resolved configuration as TOML with what it implies as comments.  Exit status 2: it would be refused."""
    from megatron_rl.config import load_config
    from megatron_rl.plan.dry_run import report
    from megatron_rl.plan.hardware import find_hardware, read_assumptions
    from megatron_rl.rollout.saved_run import check_config

    try:
        cfg = load_config(arguments.config, overrides)
        if arguments.from_rollouts is not None:
            check_config(arguments.from_rollouts, cfg)
        hardware = find_hardware(arguments.gpu) if arguments.gpu else None
        assumed = read_assumptions(arguments.assume)
        print(report(cfg, arguments.gpus, hardware, assumed, has_servers=arguments.from_rollouts is None))
    except ValueError as error:
        print(f"megatron-rl dry-run: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


# Settings -----------------------------------------------------------------------------------------------------------


def settings() -> int:
    """`megatron-rl settings`."""
    from megatron_rl.config import ConfigError
    from megatron_rl.config.settings import explain

    parser = argparse.ArgumentParser(description="Explain the settings of a configuration.")
    parser.add_argument("name", nargs="?", default="", metavar="SECTION[.KEY]", help="default: list the sections")
    try:
        print(explain(parser.parse_args().name))
    except ConfigError as error:
        print(f"megatron-rl settings: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


if __name__ == "__main__":
    sys.exit(main())
