"""Calls of users' code that may block."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


async def called(function: Callable[..., Any], /, *arguments: object, **named: object) -> Any:
    """Call `function` and wait for its result; one that is not async is called in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await in_thread(function, *arguments, **named)
    # of an async function that an ordinary decorator wraps
    return await result if inspect.isawaitable(result) else result


async def in_thread(
    function: Callable[..., Result], /, *arguments: object, **named: object
) -> Result:
    """Call `function` in a new daemon thread and wait for its result.

    Not asyncio.to_thread: asyncio joins its threads when the loop closes, so that a function that
    hangs would hang the run.  named: the model may have chosen the names, so any may be among them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(value: Result | None, error: BaseException | None) -> None:
        if future.done():  # cancelled: the caller does not wait any more
            return
        if error is None:
            future.set_result(cast("Result", value))
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*arguments, **named)
        except BaseException as raised:  # raised where the result is awaited
            error = (
                raised
                if isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                else RuntimeError(repr(raised))
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return await future
