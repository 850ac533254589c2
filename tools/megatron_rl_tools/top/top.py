"""The command `megatron-rl top`: show the status once, or until the run has ended.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console, RenderableType
from rich.live import Live

from megatron_rl.launch.status import Status, read_status
from megatron_rl_tools.top.options import parse
from megatron_rl_tools.top.render import is_live, render
from megatron_rl_tools.top.server_loads import ask_servers


def main(argv: list[str] | None = None) -> int:
    """Show the status and return the exit status: 0, or 2 for a folder without a status."""
    arguments = parse(argv)
    if arguments.api_key_env and not os.environ.get(arguments.api_key_env):
        print(
            f"megatron-rl top: --api-key-env {arguments.api_key_env}: is unset or empty; export it",
            file=sys.stderr,
        )
        return 2
    console = Console(highlight=False)
    try:
        if arguments.once or not console.is_terminal:
            console.print(look(arguments))
        else:
            follow(arguments, console)
    except ValueError as error:
        print(f"megatron-rl top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def follow(arguments: argparse.Namespace, console: Console) -> None:
    """Refresh until the run has ended."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = read_status(arguments.run)
            live.update(shown_lines(arguments, status), refresh=True)
            if status.state != "running":
                return
            time.sleep(arguments.seconds)


def look(arguments: argparse.Namespace) -> RenderableType:
    """Render the status once.  Raises ValueError if there is none."""
    return shown_lines(arguments, read_status(arguments.run))


def shown_lines(arguments: argparse.Namespace, status: Status) -> RenderableType:
    now = time.time()
    urls = status.servers if is_live(status, now - status.time) else ()
    loads = ask_servers(urls, arguments.api_key_env)
    return render(arguments.run.resolve().name, status, loads, now, every_rank=arguments.every_rank)


if __name__ == "__main__":
    sys.exit(main())
