"""Start a server of each teacher on this machine, and run a command that distils from them.

python examples/distil_cpu/with_teachers.py sums=DIRECTORY flips=DIRECTORY -- COMMAND ...

The command gets --teachers.NAME.urls URL for each.  The servers end with it; their logs are in
runs/teachers.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.process import start_server

SETTINGS = RolloutConfig(dtype="float32", max_total_tokens=32768, max_running_requests=64)
LOGS = Path("runs/teachers")


def main() -> int:
    place = sys.argv.index("--")
    teachers = dict(argument.split("=", 1) for argument in sys.argv[1:place])
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                start_server(
                    Path(model), SETTINGS, log_path=LOGS / f"{name}.log", device="cpu", seed=0,
                    want_routes=False,
                )
            )
            for name, model in teachers.items()
        }  # fmt: skip
        command = sys.argv[place + 1 :]
        for name, server in servers.items():
            server.wait_until_ready()
            print(f"teacher {name}: {teachers[name]} on {server.url}", flush=True)
            command += [f"--teachers.{name}.urls", server.url]
        process = subprocess.Popen(command)
        # Ctrl-C reaches the command itself, which saves a checkpoint before it ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
