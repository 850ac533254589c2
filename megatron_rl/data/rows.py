"""Rows of a prompt file (jsonl, parquet), and where in a row its prompt and its label are: public layouts, or dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet

AUTO = "auto"
PROMPT_KEYS = ("prompt", "messages", "problem", "question", "Problem", "Question")
LABEL_KEYS = ("label", "reward_model.ground_truth", "final_answer", "answer", "Answer")
"""Tried in this order where the configuration says auto.  slime: prompt, label.  verl: prompt, reward_model.ground_truth.
AIME, AMC, MATH-500, HMMT and their like: problem or question, answer."""
MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
MISSING = object()


class DataError(ValueError):
    """Prompts that cannot be used; the message names file, line, key, what is wrong and the rule."""


def read_rows(path: Path) -> Iterator[tuple[int, dict | DataError]]:
    """(line or row number from 1, row or what is wrong with it); blank lines of a jsonl file are passed over."""
    if not path.is_file():
        raise DataError(f"{path}: cannot be read: {'it is a directory' if path.is_dir() else 'No such file'}")
    if path.suffix == ".parquet":
        try:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_line(line)
    else:
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; prompt files are .jsonl or .parquet")


def unit(path: Path) -> str:
    """What a row of the file is called in messages."""
    return "row" if path.suffix == ".parquet" else "line"


def parse_line(line: bytes) -> dict | DataError:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}")
    except (json.JSONDecodeError, RecursionError) as error:
        return DataError(f"not JSON: {error}")
    if not isinstance(row, dict):
        return DataError(f"expected an object with keys, got {kind(row)}")
    return row


def resolve_keys(row: dict, prompt_key: str, label_key: str) -> tuple[str, str]:
    """The keys of a file, from its first row: "auto" becomes the first known one that the row has (else the usual name)."""
    found = []
    for key, known in ((prompt_key, PROMPT_KEYS), (label_key, LABEL_KEYS)):
        if key == AUTO:
            key = next((name for name in known if lookup(row, name) not in (MISSING, None)), known[0])
        found.append(key)
    return found[0], found[1]


def lookup(row: Any, key: str) -> Any:
    """The value at `key`: a key of that very name, or a path of keys and list indices joined by dots; else MISSING."""
    if isinstance(row, dict) and key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    if isinstance(row, list) and head.isdecimal() and int(head) < len(row):
        value = row[int(head)]
    elif dot and isinstance(row, dict) and head in row:
        value = row[head]
    else:
        return MISSING
    return lookup(value, rest) if dot else value


def required(row: dict, key: str) -> Any:
    value = lookup(row, key)
    if value is MISSING:
        raise DataError(f"key {key!r} is missing; it has {list(row)}")
    return value


def kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
