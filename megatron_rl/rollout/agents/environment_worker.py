"""Processes of agent.environment: `python -m megatron_rl.rollout.agents.environment_worker
MODULE:CLASS MEMORY_BYTES`.

This process imports the class once and forks for every episode, which takes milliseconds; it starts
no thread and uses no GPU.  Standard input is a socket: one JSON line in, one out.
    in   {"start": NUMBER} with a socket as ancillary data, {"end": NUMBER}: kill the episode's
         process and its children
    out  {"ready": true} or {"failed": why, "where": frames} once, then nothing
An episode's process makes the object when it starts and answers on the socket that came with it:
    in   {"call": "constructor" | "reset" | "step", "argument": fields of a Prompt, or fields_of() a
         Turn}
    out  {"answer": fields of a Step, or what reset observed} or {"failed": why, "where": frames}
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from numbers import Integral, Real
from typing import Any

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.chat import Reply, ToolCall
from megatron_rl.rollout.agents.episode import Environment, Step, Turn
from megatron_rl.workers import (
    Printed,
    end_with_parent,
    frames_of,
    json_line,
    kill_group,
    limit_memory,
    open_channel,
)

ANSWER_BYTES = 2**26
"""Of one answer: more cannot fit a context."""


def main() -> None:
    """Serve until the connection ends; then end all episodes."""
    name, memory = sys.argv[1], int(sys.argv[2])
    channel = open_channel()
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        channel.sendall(json_line(failure_of(error)))
        return
    channel.sendall(json_line({"ready": True}))
    pids: dict[int, int] = {}
    try:
        while message := receive(channel):
            order, descriptors = message
            if "end" in order:
                # else it was of a process before this one
                if (pid := pids.pop(order["end"], None)) is not None:
                    end(pid)
            elif (pid := os.fork()) == 0:
                channel.close()
                serve_episode(make, socket.socket(fileno=descriptors[0]), memory)
            else:
                pids[order["start"]] = pid
                os.close(descriptors[0])
    finally:
        for pid in pids.values():
            end(pid)


def receive(channel: socket.socket) -> tuple[dict[str, int], list[int]] | None:
    """The next order, always of 32 bytes, with its descriptors; None at the end of the connection."""
    data, descriptors, _, _ = socket.recv_fds(channel, ORDER_BYTES, 1)
    while data and len(data) < ORDER_BYTES:
        more, others, _, _ = socket.recv_fds(channel, ORDER_BYTES - len(data), 1)
        data, descriptors = data + more if more else b"", [*descriptors, *others]
    return (json.loads(data), descriptors) if data else None


ORDER_BYTES = 32


def order(**fields_of: int) -> bytes:
    """A message to `main`."""
    return json.dumps(fields_of).encode().ljust(ORDER_BYTES)


def end(pid: int) -> None:
    """Not reaped before: the number is still that of our child."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
    os.waitpid(pid, 0)


def serve_episode(make: Callable[[], Environment], channel: socket.socket, memory: int) -> None:
    """One episode, in a forked process: never returns."""
    os.setsid()
    end_with_parent()
    if memory:
        limit_memory(memory)
    reseed()
    status = 1
    try:
        with asyncio.Runner() as runner, channel.makefile("rb") as lines:
            found: dict[str, Environment] = {}
            for line in lines:
                sys.stdout = sys.stderr = Printed()
                channel.sendall(reply_line(make, found, json.loads(line), runner))
        status = 0
    finally:
        os._exit(status)


def reseed() -> None:
    """Global generators are copies of the parent's, the same in every episode; Python's own is
    seeded after a fork.
    """
    for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)()


def reply_line(
    make: Callable[[], Environment],
    found: dict[str, Environment],
    message: Mapping[str, Any],
    runner: asyncio.Runner,
) -> bytes:
    """The answer to one call.  found: the environment, once it is made."""
    try:
        if message["call"] == "constructor":
            found["environment"] = make()
            return json_line({"answer": None})
        if message["call"] == "reset":
            argument: Prompt | Turn = Prompt(**with_tuple(message["argument"]))
        else:
            argument = turn_of(message["argument"])
        answer = getattr(found["environment"], message["call"])(argument)
        if inspect.isawaitable(answer):
            answer = runner.run(awaited(answer))
        line = json_line({"answer": plain(answer)})
    # sys.exit in an environment must not look like a crash
    except (Exception, SystemExit) as error:
        return json_line(failure_of(error))
    if len(line) > ANSWER_BYTES:
        return json_line(
            {"failed": f"answered {len(line)} bytes: must be at most {ANSWER_BYTES}", "where": []}
        )
    return line


async def awaited(answer: Any) -> object:
    return await answer


def with_tuple(argument: dict[str, Any]) -> dict[str, Any]:
    return argument | {"token_ids": tuple(argument["token_ids"])}


def fields_of_turn(turn: Turn) -> dict[str, object]:
    """`turn` as JSON holds it, read in the model's chat format where there is one; the inverse of
    turn_of.
    """
    return {
        "text": turn.text,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "logprobs": turn.logprobs,
        "reply": None if turn.read is None else asdict(turn.reply),
    }


def turn_of(given: Mapping[str, Any]) -> Turn:
    named = {**given, "token_ids": tuple(given["token_ids"]), "logprobs": tuple(given["logprobs"])}
    if (reply := named.pop("reply")) is None:
        return Turn(**named)
    calls = tuple(ToolCall(**call) for call in reply["tool_calls"])
    return Turn(**named, read=lambda: Reply(reply["content"], reply["reasoning"], calls))


def plain(value: object) -> object:
    """As JSON holds it, numbers of numpy included.  Raises TypeError for what is no observation."""
    if isinstance(value, Step):
        return {"step": {each.name: plain(getattr(value, each.name)) for each in fields(value)}}
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__") and not isinstance(value, bytes):
        return [plain(item) for item in value]
    raise TypeError(
        f"answered {type(value).__name__}: must be text, numbers, lists, mappings or a Step"
    )


def failure_of(error: BaseException) -> dict[str, object]:
    return {
        "failed": f"{type(error).__name__}: {error}"[:2000],
        "where": frames_of(error, __file__),
    }


if __name__ == "__main__":
    main()
