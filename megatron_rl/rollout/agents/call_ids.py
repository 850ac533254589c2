"""Ids of tool calls in formats that write them into the prompt, as Kimi's: only the id has the name
of the function there.

    in the prompt    functions.search:0               numbered in a conversation, from 0
    for clients      call_9f3c_0:functions.search:0   differs from all others of an episode
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

OF_CLIENT = re.compile(r"call_[0-9a-f]*_\d+:(.+)", re.DOTALL)
IN_PROMPT = re.compile(r"functions\..+:\d+", re.DOTALL)


def client_id(turn: str, number: int, written: str | None) -> str:
    """Return the id of a call for clients.

    written: as the model wrote it, None where the format has no ids.
    """
    return f"call_{turn}_{number}" + (f":{written}" if written else "")


def with_written_ids(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return `messages` with the ids that the model wrote, in calls and in their answers.  A call
    with another id, of a client's history, gets the one that the model would have written.
    """
    count, known, changed = 0, dict[object, object](), list[Mapping[str, object]]()
    for message in messages:
        values = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence):
            values["tool_calls"] = after = [
                written_call(call, count + place) for place, call in enumerate(calls)
            ]
            # as texts, since a client may send anything
            known |= {str(id_of(a)): id_of(b) for a, b in zip(calls, after, strict=True)}
            count += len(after)
        if (name := message.get("tool_call_id")) is not None:
            values["tool_call_id"] = known.get(str(name), written(name) or name)
        changed.append(values)
    return changed


def written_call(call: object, number: int) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call  # the format refuses it
    name = written(id_of(call)) or f"functions.{function.get('name')}:{number}"
    return {**call, "id": name}


def written(name: object) -> str | None:
    """Return the id that the model wrote, None for one that it did not write."""
    match = OF_CLIENT.fullmatch(str(name))
    if match:
        return match[1]
    return str(name) if IN_PROMPT.fullmatch(str(name)) else None


def id_of(call: object) -> object:
    return call.get("id") if isinstance(call, Mapping) else None
