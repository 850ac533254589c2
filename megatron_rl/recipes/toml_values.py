"""Changes values in the text of a TOML file and keeps everything else, comments above all."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

from megatron_rl.config.toml_places import key_places

# a value is texts, in which # is no comment, and anything else
LINE = re.compile(
    r"""(?P<key>\s*[\w-]+\s*=\s*)(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^"'#])*?(?P<comment>\s*\#.*)?"""
)


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return `text` with "section.key" set to each value; None removes the key.

    A key that the file does not set is added at the end of its section.  Values are numbers, texts,
    booleans and lists of them, in the file each on one line.  Raises ValueError where the changed
    text would not say what `values` say.
    """
    for name, value in values.items():
        text = with_value(text, name, value)
        if read_value(text, name) != value:
            raise ValueError(f"{name} could not be set to {value!r}: write its value on one line")
    return text


def read_value(text: str, name: str) -> object:
    """Return the value of "section.key"; None where it is not set, or the text is not TOML."""
    section, _, key = name.partition(".")
    try:
        return tomllib.loads(text).get(section, {}).get(key)
    except tomllib.TOMLDecodeError:
        return None


def with_value(text: str, name: str, value: object) -> str:
    section, _, key = name.partition(".")
    lines, places = text.splitlines(), key_places(text)
    if name in places:
        number = int(places[name].partition(":")[0]) - 1
        match = LINE.fullmatch(lines[number])
        if match is None:
            raise ValueError(f"{name}: line {number + 1} is not KEY = VALUE")
        changed = f"{match['key']}{json.dumps(value)}"
        if comment := match["comment"]:
            # in its column, where the value leaves room
            column = match.end("comment") - len(comment.lstrip())
            changed = f"{changed:<{column - 1}} {comment.lstrip()}"
        lines[number : number + 1] = [] if value is None else [changed]
    elif value is not None:
        if section not in places:
            lines += ["", f"[{section}]"]
            place = len(lines)
        else:
            place = end_of_section(lines, int(places[section].partition(":")[0]))
        lines.insert(place, f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def end_of_section(lines: list[str], start: int) -> int:
    """Return the index after the last setting of the section whose header is line `start`, from
    1.
    """
    last = start
    for number in range(start, len(lines)):
        if lines[number].startswith("["):
            break
        if lines[number].strip() and not lines[number].lstrip().startswith("#"):
            last = number + 1
    return last
