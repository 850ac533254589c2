"""Looks at runs in a browser, while they run or after: curves, health, and each token of their
rollouts.

megatron-rl view runs/demo                                        # prints a URL; Ctrl-C stops it
megatron-rl view runs/a runs/b --port 8800                        # two runs, to compare
megatron-rl view runs/demo --export out --rollouts 12/rollouts/Q7%2F3   # a copy that opens from \
disk
megatron-rl view runs/demo --export out --filter '[{"column": "reward", "op": "<", "value": 0.5}]' \
--limit 20
"""

from __future__ import annotations

import argparse
import secrets
import socket
import sqlite3
import sys
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.options import positive

if TYPE_CHECKING:
    from megatron_rl_viewer.run_folder import Runs

BAD_ARGUMENTS = 2
LOOPBACK = "127.0.0.1"
PORT = 8765
EXPORTED = 20
"""Default number of exported rollouts."""


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        names = " and ".join(missing)
        print(
            f"megatron-rl view: {names} not installed; in a checkout: pip install ./viewer",
            file=sys.stderr,
        )
        return BAD_ARGUMENTS
    from megatron_rl_viewer.index import default_cache
    from megatron_rl_viewer.run_folder import NoRunError, Runs

    try:
        runs = Runs(arguments.runs, arguments.cache or default_cache(), arguments.tokenizer)
    except (NoRunError, OSError, sqlite3.Error) as error:
        is_run = not isinstance(error, NoRunError)
        fix = "; set --cache DIR to a folder that can be written" if is_run else ""
        print(f"megatron-rl view: {error}{fix}", file=sys.stderr)
        return BAD_ARGUMENTS
    if arguments.export is not None:
        return write_export(runs, arguments)
    return serve_pages(runs, arguments.host, arguments.port)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--port", type=int, help=f"default: {PORT}, or a free one if it is taken")
    add("--host", default=LOOPBACK, help="address to listen on (default: this machine only)")
    text = "folder of the tokenizer (default: hf/ of the run, else its model.path)"
    add("--tokenizer", type=Path, metavar="DIR", help=text)
    text = (
        "of the index (default: $XDG_CACHE_HOME/megatron_rl or ~/.cache/megatron_rl); on a"
        " local disk: SQLite needs locks that network file systems (NFS) may lack"
    )
    add("--cache", type=Path, metavar="DIR", help=text)
    text = "write a copy of chosen rollouts that opens from disk, and stop"
    add("--export", type=Path, metavar="DIR", help=text)
    text = "export: these, STEP/FILE/ID as in the viewer's address"
    add("--rollouts", nargs="+", default=[], metavar="KEY", help=text)
    text = 'export: those that fit, [{"column": "reward", "op": "<", "value": 0.5}, ...]'
    add("--filter", metavar="JSON", help=text)
    add("--search", metavar="TEXT", help="export: those with these words")
    text = f"export: at most N of them, the newest (default: {EXPORTED})"
    add("--limit", type=positive, metavar="N", help=text)
    arguments = parser.parse_args(argv)
    chosen = {
        "--rollouts": arguments.rollouts,
        "--filter": arguments.filter,
        "--search": arguments.search,
    }
    unused = [name for name, value in {**chosen, "--limit": arguments.limit}.items() if value]
    if arguments.export is None and unused:
        parser.error(f"{unused[0]} has no effect without --export DIR")
    return arguments


def write_export(runs: Runs, arguments: argparse.Namespace) -> int:
    from megatron_rl_viewer.app import STATIC
    from megatron_rl_viewer.disk_copy import ExportError, write_copy
    from megatron_rl_viewer.query import Query, QueryError, parse_filters

    is_query = not arguments.rollouts or arguments.filter or arguments.search
    try:
        filters = parse_filters(arguments.filter or "")
        limit, words = arguments.limit or EXPORTED, arguments.search or ""
        query = Query(limit=limit, text=words, filters=filters) if is_query else None
        page = write_copy(runs, arguments.export, STATIC, keys=arguments.rollouts, query=query)
    except (ExportError, QueryError, OSError) as error:
        print(f"megatron-rl view: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    size = sum(path.stat().st_size for path in arguments.export.rglob("*") if path.is_file())
    print(f"{page} ({size / 1e6:.1f} MB)")
    return 0


def serve_pages(runs: Runs, host: str, port: int | None) -> int:
    import uvicorn

    from megatron_rl_viewer.app import create_app

    try:
        listener = bind_socket(host, port)
    except OSError as error:
        print(
            f"megatron-rl view: {host}:{port}: {error.strerror}; set another --port or --host",
            file=sys.stderr,
        )
        return BAD_ARGUMENTS
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32)
    if not is_loopback(listener):
        print(
            f"warning: --host {host}: other machines can reach this server over unencrypted HTTP;"
            " whoever has the URL reads the runs",
            file=sys.stderr,
        )
    for run in runs.runs:
        print(f"run {run.folder}", flush=True)
    shown = f"[{host}]" if ":" in host else host
    print(f"open http://{shown}:{port}/?token={token}", flush=True)
    # no access log: it would show the token.  No log_config: uvicorn's default closes every log
    # handler of the process
    config = uvicorn.Config(
        create_app(runs, token, port=port),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine reaches the listener, from the address that it is bound to:
    a name such as "localhost" may resolve to any.
    """
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def bind_socket(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; the default port is PORT, or a free one if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (PORT, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            # the URL is printed before the server accepts: a browser that opens it then waits
            listener.listen(128)
            return listener
        except OSError:
            listener.close()
            if port is not None or number == 0:
                raise
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
