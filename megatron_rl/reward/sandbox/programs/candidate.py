"""Runs the model's code, and calls its functions for the tests, which run in another box.

Messages, one JSON line each, over standard input and output:
    {"code": text}                           -> {"value": None}
    {"get": name}                            -> the value of a name of the code
    {"call": object, "arguments", "keywords"} -> what the call returned
    {"attribute": object, "name": name}      -> an attribute of an object
    {"operator": name, "arguments"}          -> the result of one of OPERATORS
An answer is {"value": ..., "arguments": the arguments after the call} or {"raised": [type, text]}.
Nothing here must be trusted by the reader: the code may change all of it.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from megatron_rl.reward.sandbox.programs.plain_values import (
    NotPlain,
    decode,
    encode,
    entries_of,
    read_message,
    write_message,
)

OPERATORS: dict[str, Callable[..., object]] = {
    "len": len,
    "str": str,
    "iter": entries_of,
    "getitem": operator.getitem,
}


def serve() -> None:
    """Answer messages until their end."""
    # the code's own output goes nowhere
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    # a module that can be imported: pickle looks for classes there
    sys.modules["__main__"] = ModuleType("__main__")
    names = sys.modules["__main__"].__dict__
    objects: list = []

    def keep(value: object) -> object:
        objects.append(value)
        return ["object", len(objects) - 1]

    while True:
        try:
            message = read_message(messages)
        except EOFError:
            return
        try:
            answer = answer_to(message, names, objects, keep)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answer = raised(error)
        try:
            write_message(answers, answer)
        except (NotPlain, ValueError, RecursionError) as error:
            write_message(answers, raised(error))


def answer_to(
    message: dict[str, Any],
    names: dict[str, Any],
    objects: list[Any],
    keep: Callable[[object], object],
) -> dict[str, object]:
    """Do what a message asks for, and return the answer."""
    if "code" in message:
        # without this module's `annotations`, which would let names be used without their import
        program = compile(message["code"], "solution.py", "exec", dont_inherit=True)
        # the usual ends of a main part: sys.exit(main()), and input() where there is none
        with suppress(SystemExit, EOFError):
            exec(program, names)  # noqa: S102
        return {"value": None}
    if "get" in message:
        if message["get"] not in names:
            raise NameError(f"name {message['get']!r} is not defined")
        return {"value": encode(names[message["get"]], keep)}
    if "attribute" in message:
        return {"value": encode(getattr(objects[message["attribute"]], message["name"]), keep)}
    arguments = [decode(value, objects.__getitem__) for value in message["arguments"]]
    if "operator" in message:
        return {"value": encode(OPERATORS[message["operator"]](*arguments), keep)}
    keywords = {
        name: decode(value, objects.__getitem__) for name, value in message["keywords"].items()
    }
    value = objects[message["call"]](*arguments, **keywords)
    # a function may change a list that it got
    after = [
        encode(argument, keep) if type(argument) in (list, dict, set) else None
        for argument in arguments
    ]
    return {"value": encode(value, keep), "arguments": after}


def raised(error: BaseException) -> dict:
    kind = next(
        (base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"),
        "Exception",
    )
    try:
        text = str(error)[:500]
    except Exception:
        text = ""
    return {"raised": [kind, text.encode("utf-8", "replace").decode()]}


if __name__ == "__main__":
    serve()
