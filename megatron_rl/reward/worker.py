"""The worker process: `python -m megatron_rl.reward.worker FUNCTION PATTERN SECONDS`.  One JSON
line in, one JSON line out.

in: {"number": of the call, "item": see function.py}; out: {"number", "replies": one Scored or
Failure (failures.py) each}. First line out: {"form", "is_async"} of the function, or a Failure.
Standard input is a socket that carries both.  Calls of an async function run side by side in one
event loop, as many as the pool sends.  Loads no torch: it starts in a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from megatron_rl.reward.function import RewardFunction, failure, load_reward
from megatron_rl.workers import Printed, end_with_parent, json_line, limit_memory, open_channel

MEMORY_BYTES = 4 * 2**30  # of address space
LINE_BYTES = 2**30


def main() -> None:
    """Serve until the connection or the parent ends."""
    end_with_parent()
    channel = open_channel()
    name, pattern, seconds = sys.argv[1:]
    # 10**10**8 ends in MemoryError; a user's function may need the address space (CUDA does)
    if name == "math":
        limit_memory(MEMORY_BYTES)
    try:
        function = load_reward(name, pattern)
    except Exception as error:
        channel.sendall(json_line(failure(error)))
        return
    channel.sendall(json_line({"form": function.form, "is_async": function.is_async}))
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
            channel.sendall(
                json_line({"number": call["number"], "replies": function.call(call["item"])})
            )


async def serve_async(function: RewardFunction, channel: socket.socket, seconds: float) -> None:
    """Every call as a task; each ends within `seconds`, unless the function blocks the loop."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_BYTES)

    async def answer(number: int, item: list[object]) -> None:
        writer.write(
            json_line({"number": number, "replies": await function.call_async(item, seconds)})
        )

    async with asyncio.TaskGroup() as calls:
        while line := await reader.readline():
            sys.stdout = sys.stderr = Printed()
            calls.create_task(answer(**json.loads(line)))


if __name__ == "__main__":
    main()
