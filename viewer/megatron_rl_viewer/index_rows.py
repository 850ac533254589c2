"""Values of the index's rows, parsed from the lines of both halves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from urllib.parse import quote

import numpy as np
import orjson

from megatron_rl_viewer.follow import Line
from megatron_rl_viewer.index_schema import TRAINED_NUMBERS

LARGEST = float(np.finfo(np.float32).max)
"""The largest float32."""
ToRow = Callable[[str, Line, dict], tuple]
"""(stem of the file, line, its fields) -> values of a row.  Raises ValueError, KeyError or
TypeError for another kind of line.
"""


def parsed(line: bytes) -> dict:
    """Return the fields of a line.  Raises ValueError, or RecursionError, for another text."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # json also reads NaN, and half a surrogate pair
        return json.loads(line)


def index_row(file: str, line: Line, fields: dict) -> tuple:
    """Return the values of index_schema.ROW after number and file.

    A line of an older version has one policy_version for the entire response.
    """
    step, name = integer(fields, "step"), text(fields, "id")
    length = integer(fields, "response_length")
    integer(fields, "prompt_length", 0)
    _ = fields["response"]  # KeyError for a line without it
    spans = fields.get("policy_versions") or [[fields.get("policy_version"), length]]
    versions = [
        version
        for version, tokens in spans
        if isinstance(tokens, int) and isinstance(version, int | None)
    ]
    fit = all(version is None or -(2**63) <= version < 2**63 for version in versions)
    if len(versions) != len(spans) or not fit:
        raise ValueError(
            f"policy_versions = {spans}: must be [[version, tokens], ...], integers of 64 bits"
        )
    episode = text(fields, "episode", "")
    prompt = (episode or name).rpartition("/")[0]
    return (
        step,
        name,
        rollout_key(step, file, prompt),
        episode,
        prompt_key(fields["prompt"]),
        line.offset,
        len(line.data),
        number_or_none(fields.get("reward")),
        number_or_none(fields.get("advantage")),
        length,
        text(fields, "finish_reason", ""),
        versions[0],
        ", ".join(str(version) for version in dict.fromkeys(versions)),
        integer(fields, "num_turns", 1),
    )


def trained_row(file: str, line: Line, fields: dict) -> tuple:
    """Return the values of the table `trained`.

    `sampled_by` names the rollout's file, because ids may be unique only within a file.
    """
    if fields["schema"] != 1:
        raise ValueError(
            f"schema = {fields['schema']}: must be 1, which this version of the viewer reads"
        )
    sampled_by = text(fields, "sampled_by", "").removesuffix(".jsonl")
    numbers = [number_or_none(fields.get(name)) for name in TRAINED_NUMBERS]
    return integer(fields, "step"), text(fields, "id"), sampled_by, line.data.decode(), *numbers


def integer(fields: dict, name: str, default: int | None = None) -> int:
    value = fields[name] if default is None else fields.get(name, default)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise TypeError(f"{name} = {value!r}: must be an integer of 64 bits")
    return value


def text(fields: dict, name: str, default: str | None = None) -> str:
    value = fields[name] if default is None else fields.get(name, default)
    if not isinstance(value, str):
        raise TypeError(f"{name} = {value!r}: must be a text")
    value.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
    return value


def number_or_none(value: object) -> float | None:
    """Return a number that a table shows; None for NaN and infinity, which json reads."""
    return to_float32(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def to_float32(value: float) -> float:
    """Return the shortest decimal number that has the same float32 as the value.

    The trainer has rewards, advantages and log-probs in float32.  Written as a double, 0.1 is
    0.10000000149011612, which a filter for 0.1 would miss.
    """
    # numpy would warn of a larger one, which stays as it is
    return float(str(np.float32(value))) if abs(value) < LARGEST else float(value)


def searched_text(value: object) -> str:
    """Return a prompt, which may be a list of messages, as a text that SQLite stores.

    Half a surrogate pair becomes "?".
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def prompt_key(prompt: object) -> str:
    """Return the key of a prompt, equal in every step and run: blake2b of its text, 16 hex digits.

    Every saved rollout has the text.  Its token ids are in the token data alone, which most runs
    save of a few groups or of none.
    """
    return hashlib.blake2b(searched_text(prompt).encode(), digest_size=8).hexdigest()


def rollout_key(step: int, file: str, name: str) -> str:
    """Return the name of a rollout in URLs, e.g. "12/rollouts/Q7%2F3"; with a prompt's id, that of
    a group.
    """
    return f"{step}/{file}/{quote(name, safe='')}"
