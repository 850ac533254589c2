"""The command `megatron-rl`.  It imports nothing heavy until a command needs it.

    megatron-rl COMMAND [...]        megatron-rl COMMAND --help

On several ranks: megatron-rl launch ... -m megatron_rl.cli COMMAND ...
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from importlib import import_module

from megatron_rl import commands
from megatron_rl.options import parse, parse_evaluate, parse_sft

BAD_ARGUMENTS = 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 2 if it is unknown or not installed."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(import_module("megatron_rl").__version__)
        return 0
    if name not in commands.installed():
        print(f"megatron-rl: {why_not(name)}", file=sys.stderr)
        return BAD_ARGUMENTS
    # `python -m` looks there for the user's modules, a console script in its bin folder
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.argv = [f"megatron-rl {name}", *arguments]  # argparse takes the program's name from it
    return commands.load(name)() or 0


def why_not(name: str) -> str:
    """The reason why a command cannot be run, and the fix."""
    if folder := commands.folder_of(name):
        return f"the package of {name} is not installed; in a checkout: pip install {folder}"
    known = [name for names in commands.PACKAGES.values() for name in names]
    near = difflib.get_close_matches(name, {*known, *commands.installed()}, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(commands.installed())}"
    return f"unknown command {name!r}; {hint}"


def overview() -> str:
    """The installed commands with their help, and the packages of ours that are not installed."""
    names = commands.installed()
    width = max(map(len, names), default=0) + 2
    missing = [
        f"not installed: {', '.join(absent)}; in a checkout: pip install {folder}"
        for folder, ours in commands.PACKAGES.items()
        if (absent := [name for name in ours if name not in names])
    ]
    return "\n".join(
        [
            "usage: megatron-rl COMMAND ...",
            "",
            *(f"  {name:<{width}}{commands.help_of(name)}" for name in names),
            "",
            *missing,
            (
                "megatron-rl COMMAND --help describes one.  N ranks: megatron-rl launch"
                " --nproc_per_node N -m megatron_rl.train ..."
            ),
        ]
    )


# The commands of this package. Help, refused options and the dry run come before the imports that
# take seconds. ------


CHECK = (
    "Check a configuration and print what the run will do.  Starts nothing, needs no GPU; the"
    " options are those of train."
)


def train() -> int:
    """Train in this process; on several ranks: launch."""
    arguments, overrides = parse()
    if arguments.dry_run:
        return import_module("megatron_rl.plan.dry_run").print_report(arguments, overrides)
    return import_module("megatron_rl.train").main()


def sft() -> int:
    """Train on conversations that have their answers (supervised)."""
    parse_sft()
    return import_module("megatron_rl.sft").main()


def launch() -> int:
    """Start torchrun, and keep the ranks' exit statuses."""
    return import_module("megatron_rl.launch.__main__").main()


def dry_run() -> int:
    """Check a configuration and print what the run will do."""
    return import_module("megatron_rl.plan.dry_run").print_report(
        *parse(["--dry-run", *sys.argv[1:]], CHECK)
    )


def evaluate() -> int:
    """Compute avg@n and pass@k of a checkpoint or a run."""
    parse_evaluate()
    return import_module("megatron_rl.evaluate").main()


def new() -> int:
    """Make a project of your own from a recipe."""
    import_module("megatron_rl.recipes.options").parse_new()
    return import_module("megatron_rl.recipes.new").main()


def settings() -> int:
    """Explain the settings of a configuration."""
    from megatron_rl.config import ConfigError
    from megatron_rl.config.settings import explain

    parser = argparse.ArgumentParser(description="Explain the settings of a configuration.")
    parser.add_argument(
        "name", nargs="?", default="", metavar="SECTION[.KEY]", help="default: list the sections"
    )
    try:
        print(explain(parser.parse_args().name))
    except ConfigError as error:
        print(f"megatron-rl settings: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


if __name__ == "__main__":
    sys.exit(main())
