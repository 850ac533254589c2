"""The worker process: `python -m megatron_rl.reward.worker FUNCTION PATTERN SECONDS`.  One JSON line in, one JSON line out.

in: {"number": of the call, "item": see function.py}; out: {"number", "replies": one Scored or Failure (failures.py) each}.
First line out: {"form", "is_async"} of the function, or a Failure.  Standard input is a socket that carries both.  Calls of an
async function run side by side in one event loop, as many as the pool sends.  Loads no torch: it starts in a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import os
import resource
import signal
import socket
import sys

from megatron_rl.reward.function import RewardFunction, failure, load_function

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 * 2**30  # of address space
PRINTED_CHARACTERS = 4096  # per call: a gigabyte would bury the run's own output
LINE_BYTES = 2**30


def main() -> None:
    """Serve until the connection or the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # a copy that children do not inherit: one that outlives a crashed worker would keep the connection open
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what C code or children print belongs to standard error
    name, pattern, seconds = sys.argv[1:]
    if name == "math":  # 10**10**8 ends in MemoryError; a user's function may need the address space (CUDA does)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        function = load_function(name, pattern)
    except Exception as error:
        channel.sendall(line_of(failure(error)))
        return
    channel.sendall(line_of({"form": function.form, "is_async": function.is_async}))
    if function.is_async:
        asyncio.run(serve_async(function, channel, float(seconds)))
    else:
        serve(function, channel)


def serve(function: RewardFunction, channel: socket.socket) -> None:
    """One call at a time."""
    with channel.makefile("rb") as lines:
        for line in lines:
            call = json.loads(line)
            sys.stdout = sys.stderr = Printed()
            channel.sendall(line_of({"number": call["number"], "replies": function.call(call["item"])}))


async def serve_async(function: RewardFunction, channel: socket.socket, seconds: float) -> None:
    """Every call as a task; each ends within `seconds`, unless the function blocks the loop."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_BYTES)

    async def answer(number: int, item: list[object]) -> None:
        writer.write(line_of({"number": number, "replies": await function.call_async(item, seconds)}))

    async with asyncio.TaskGroup() as calls:
        while line := await reader.readline():
            sys.stdout = sys.stderr = Printed()
            calls.create_task(answer(**json.loads(line)))


def line_of(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


class Printed(io.TextIOBase):
    """Passes the first characters that a function prints in a call to standard error."""

    def __init__(self) -> None:
        self.left = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        if self.left > 0:
            print(text[: self.left], end="", file=sys.__stderr__, flush=True)
            self.left -= len(text)
        return len(text)


if __name__ == "__main__":
    main()
