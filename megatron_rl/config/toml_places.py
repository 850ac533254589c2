"""Finds where a TOML file sets its keys, for error messages: tomllib does not say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

STATEMENT = re.compile(r"\s*(?:\[+\s*(?P<table>[^\]=]+?)\s*\]+|(?P<key>[\w.\s\"'-]+?)\s*=)")
NAMED = re.compile(r"\[(\w+)\]|\b(\w+\.\w+)")


def key_places(text: str) -> dict[str, str]:
    """Return LINE:COLUMN, from 1, where a valid file first names "section" and "section.key"."""
    places: dict[str, str] = {}
    table: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = STATEMENT.match(line)
        if match is None or not is_complete(lines[:number]):
            continue
        kind = "table" if match["table"] else "key"
        names = [part.strip(" \t\"'") for part in match[kind].split(".")]
        if kind == "table":
            table = names
        full = table if kind == "table" else table + names
        for depth in (1, 2)[: len(full)]:
            places.setdefault(".".join(full[:depth]), f"{number + 1}:{match.start(kind) + 1}")
    return places


def is_complete(lines: list[str]) -> bool:
    """Return True where a statement may begin after these lines, as no string or list is open."""
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def located(message: str, places: Mapping[str, str]) -> str:
    """Put the place of the first setting that a message names before its fix in front of it."""
    names = [match[1] or match[2] for match in NAMED.finditer(message.partition(";")[0])]
    place = next((places[name] for name in names if name in places), None)
    return message if place is None else f"{place}: {message}"


def syntax_place(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Return LINE:COLUMN of a syntax error."""
    match = re.search(r"at line (\d+), column (\d+)", str(error))
    # without a line: "at end of document"
    return f"{match[1]}:{match[2]}" if match else f"{len(text.splitlines())}:1"
