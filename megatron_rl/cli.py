"""The command `megatron-rl`, and the options of training.  Imports nothing heavy until a command needs it.

    megatron-rl COMMAND [...]        megatron-rl COMMAND --help

Every command is also `python -m` its module (COMMANDS), which is what torchrun starts.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

BAD_ARGUMENTS = 2


@dataclass(frozen=True)
class Command:
    """target: module:function, which reads sys.argv and returns an exit status (or None for 0)."""

    target: str
    help: str


COMMANDS = {
    "train": Command("megatron_rl.cli:train", "train in this process; on several ranks: launch"),
    "launch": Command("megatron_rl.launch.torchrun:main", "torchrun that keeps the ranks' exit statuses"),
    "dry-run": Command("megatron_rl.cli:dry_run", "check a configuration and print what the run will do"),
    "settings": Command("megatron_rl.cli:settings", "explain the settings of a configuration"),
    "evaluate": Command("megatron_rl.evaluate:main", "avg@n and pass@k of a checkpoint or a run"),
    "plan": Command("megatron_rl.tools.plan_layouts:main", "propose parallel layouts for a model and a number of GPUs"),
    "doctor": Command("megatron_rl.tools.doctor.doctor:main", "check this machine, its packages and servers"),
    "convert": Command(
        "megatron_rl.tools.convert.convert_hf:main", "HF checkpoint <-> Megatron distributed checkpoint"
    ),
    "quantize": Command("megatron_rl.tools.quantize.quantize_hf:main", "quantize or dequantize an HF checkpoint"),
    "verify-replay": Command("megatron_rl.tools.verify_replay.verify_replay:main", "prove routing replay in a layout"),
    "replay-batch": Command("megatron_rl.tools.replay_batch:main", "compute a saved mini-batch again, in any layout"),
    "explain-mismatch": Command(
        "megatron_rl.tools.explain_mismatch.explain_mismatch:main", "why trainer and server disagree, and since when"
    ),
    "gpu-check": Command(
        "megatron_rl.tools.gpu_check.gpu_check:main", "check what a first GPU must show, step by step"
    ),
    "check-rollouts": Command(
        "megatron_rl.tools.check_rollouts.check_rollouts:main", "check the saved rollouts of a run"
    ),
    "view": Command("megatron_rl.viewer.command:main", "look at runs and each token of their rollouts in a browser"),
    "report": Command("megatron_rl.tools.plot_run:main", "report of a run, or a comparison of several"),
    "top": Command("megatron_rl.tools.top.top:main", "what every rank and server of a run does now"),
    "trace": Command("megatron_rl.tools.trace.trace:main", "where a traced step spent its time, for Perfetto"),
    "make-tiny-model": Command("megatron_rl.tools.make_tiny_moe:main", "make the tiny MoE checkpoint of the demo"),
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
    module, _, function = COMMANDS[name].target.partition(":")
    return getattr(import_module(module), function)() or 0


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

TRAIN = "Train.  On N ranks: megatron-rl launch --nproc_per_node N -m megatron_rl.train --config FILE.toml ..."
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


def parse(argv: list[str] | None = None, description: str = TRAIN) -> tuple[argparse.Namespace, list[str]]:
    """The options of training, and all overrides --section.key VALUE, including those that options set."""
    from megatron_rl.config.arguments import split

    parser = make_parser(description)
    arguments, overrides = parser.parse_known_args(argv)
    for option in (option.partition("=")[0] for option, _ in split(overrides) if "." not in option):
        if near := difflib.get_close_matches(option, parser._option_string_actions, n=1, cutoff=0.75):
            parser.error(f"unknown option {option}; did you mean {near[0]}?")
    if arguments.gpus and not arguments.dry_run:
        parser.error(f"--gpus {arguments.gpus} has no effect without --dry-run: torchrun sets the number of ranks")
    if (arguments.gpu or arguments.assume) and not arguments.dry_run:
        parser.error("--gpu and --assume have no effect without --dry-run: they change its computed times")
    if arguments.only:
        overrides += ["--rollout.save_tensors"]
    if arguments.resume:
        overrides += ["--checkpoint.require"]
    if arguments.log_format:
        overrides += ["--run.log_format", arguments.log_format]
    return arguments, overrides


def make_parser(description: str) -> argparse.ArgumentParser:
    from megatron_rl.config.settings import section_lines

    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE.toml [OPTIONS] [--SECTION.KEY VALUE ...]",
        description=description,
        epilog=f"settings, in the file or as --SECTION.KEY VALUE; `megatron-rl settings SECTION[.KEY]` explains them:\n"
        f"{section_lines()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="settings, as TOML")
    add("--resume", action="store_true", help="continue from the newest checkpoint of the run; there must be one")
    add("--log-format", choices=("text", "json"), help="lines on the terminal: text, or JSON for machines")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--only", choices=("rollout",), help="sample, score and save rollouts; train nothing")
    kind.add_argument("--from-rollouts", type=Path, metavar="DIR", help="train on the rollouts saved by the run in DIR")
    add(
        "--dry-run",
        action="store_true",
        help="check everything that can be checked here and print what the run will do",
    )
    add("--gpus", type=positive, metavar="N", help="dry run: ranks (default: WORLD_SIZE, else the fewest that fit)")
    add("--gpu", metavar="NAME", help="dry run: hardware of its times, e.g. h100 (megatron_rl/plan/hardware.py)")
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help="dry run: an assumption of its times")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


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
