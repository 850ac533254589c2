"""Rows of a prompt file (jsonl, parquet), and the keys of a row's prompt and label: keys of public
datasets, or dotted keys.

No tokenizer is needed here, so a dry run checks files by the same rules as a run.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from megatron_rl.config import ConfigError, DataConfig

Message: TypeAlias = dict[str, Any]
"""{"role": text, "content": text}, and any other field that a chat template reads."""
JsonRow: TypeAlias = dict[str, object]

AUTO = "auto"
PROMPT_KEYS = ("prompt", "messages", "problem", "question", "Problem", "Question")
LABEL_KEYS = ("label", "reward_model.ground_truth", "final_answer", "answer", "Answer")
"""The keys that "auto" tries, in this order.  slime: prompt, label.  verl: prompt,
reward_model.ground_truth.  AIME, AMC, MATH-500, HMMT: problem or question, answer."""
MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
MISSING = object()
"""The result of `lookup` for a key that a row does not have; None is a value."""
MAX_ERRORS_SHOWN = 5


class DataError(ConfigError):
    """An error in a prompt file; the message names file, line, key, value and rule."""


@dataclass(frozen=True)
class Row:
    """One prompt before it is rendered."""

    number: int
    """The line (jsonl) or row (parquet) of the file, from 1."""
    id: str
    messages: tuple[Message, ...]
    """The chat; its last message, which is to be answered, is put into data.template."""
    label: str
    keys: tuple[str, str]
    """The keys of the prompt and of the label."""
    metadata: JsonRow
    """The further columns, for reward functions; every value is JSON."""


@dataclass(frozen=True, order=True)
class BrokenRow:
    """A row that cannot be used."""

    number: int
    why: str


def parse_rows(path: Path, config: DataConfig, source: str = "") -> Iterator[Row | BrokenRow]:
    """Yield every row of the file, in its order.

    The first row decides the keys.  A row without an id gets SOURCE:LINE, or FILE:LINE without a
    source.  Raises DataError for a file that cannot be read.
    """
    keys: tuple[str, str] | None = None
    for number, raw in read_rows(path):
        try:
            row = parse_line(raw) if isinstance(raw, bytes) else raw
            # the same keys for all rows, so that a row with another key is an error
            keys = keys or resolve_keys(row, config.prompt_key, config.label_key)
            name = f"{source or path.stem}:{number}"
            if row.get("id") is not None:
                name = checked_unicode(str(row["id"]), "id")
            messages, label = tuple(prompt_messages(row, keys[0], config)), label_text(row, keys[1])
            metadata = metadata_of(row, keys, config.max_metadata_bytes)
            yield Row(number, name, messages, label, keys, metadata)
        except DataError as error:
            yield BrokenRow(number, str(error))


def check_rows(path: Path, config: DataConfig, most: int) -> None:
    """Raise DataError where one of the first `most` rows is broken, or where there are none."""
    rows = list(islice(parse_rows(path, config), most))
    broken = [row for row in rows if isinstance(row, BrokenRow)]
    if broken:
        raise DataError(describe_broken_rows(path, broken))
    if not rows:
        raise DataError(f"{path}: no prompts in it")


def describe_broken_rows(path: Path, broken: Sequence[BrokenRow]) -> str:
    """Return one line for each of the first broken rows, and one with the number of the others."""
    shown = sorted(broken)[:MAX_ERRORS_SHOWN]
    lines = [f"{path}, {unit(path)} {row.number}: {row.why}" for row in shown]
    more = len(broken) - MAX_ERRORS_SHOWN
    return "\n".join([*lines, f"... and {more} more"] if more > 0 else lines)


def read_rows(path: Path) -> Iterator[tuple[int, JsonRow | bytes]]:
    """Yield (line or row number from 1, the row or its bytes); blank lines are skipped."""
    if not path.is_file():
        problem = "it is a directory" if path.is_dir() else "No such file"
        raise DataError(f"{path}: cannot be read: {problem}")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # the import takes 0.3 s, which jsonl files do not need

        try:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    else:
        raise DataError(
            f"{path}: unknown suffix {path.suffix!r}; prompt files are .jsonl or .parquet"
        )


def unit(path: Path) -> str:
    """Return the word for a row of the file in messages."""
    return "row" if path.suffix == ".parquet" else "line"


def parse_line(line: bytes) -> JsonRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # Windows editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from error
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"expected an object with keys, got {kind(row)}")
    return row


def resolve_keys(row: JsonRow, prompt_key: str, label_key: str) -> tuple[str, str]:
    """Return the keys of a file's prompts and labels, from its first row."""
    return first_key(row, prompt_key, PROMPT_KEYS), first_key(row, label_key, LABEL_KEYS)


def first_key(row: JsonRow, key: str, known: Sequence[str]) -> str:
    """Return `key`; for "auto" the first known key that the row has, or the first known key."""
    if key != AUTO:
        return key
    return next((name for name in known if lookup(row, name) not in (MISSING, None)), known[0])


def lookup(row: object, key: str) -> object:
    """Return the value of a row at `key`, or MISSING.

    The key is a name in the row, or a path of names and list indices joined by dots.
    """
    if isinstance(row, dict) and key in row:
        return row[key]
    head, dot, tail = key.partition(".")
    if isinstance(row, list) and head.isdecimal() and int(head) < len(row):
        value = row[int(head)]
    elif dot and isinstance(row, dict) and head in row:
        value = row[head]
    else:
        return MISSING
    return lookup(value, tail) if dot else value


def required(row: JsonRow, key: str) -> object:
    value = lookup(row, key)
    if value is MISSING:
        raise DataError(f"key {key!r} is missing; it has {list(row)}")
    return value


def prompt_messages(row: JsonRow, key: str, config: DataConfig) -> list[Message]:
    """Return the chat of a row, or its text as a chat of one message, with the last message put
    into data.template.
    """
    prompt = required(row, key)
    check_no_media(row)
    if isinstance(prompt, str):
        check_text(prompt, key)
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        messages = [checked_message(message, key) for message in prompt]
        if not config.chat_template:
            raise DataError(
                f"{key!r} is a list of chat messages, which needs data.chat_template = true"
            )
        if not messages or messages[-1]["role"] == "assistant":
            raise DataError(
                f"{key!r} must end with a message to answer, not with the assistant's, got"
                f" {prompt!r:.200}"
            )
    else:
        raise DataError(f"{key!r} must be text or a list of chat messages, got {kind(prompt)}")
    messages[-1]["content"] = config.template.replace("{prompt}", messages[-1]["content"])
    return messages


def check_no_media(row: JsonRow) -> None:
    """Raise DataError for a row with images, video or audio, without which its text is another
    task.
    """
    for media in MEDIA_KEYS:
        if row.get(media):
            raise DataError(
                f"{media!r} is not empty: prompts are text only; leave out rows with images, video"
                " or audio"
            )


def checked_message(message: object, key: str) -> Message:
    """Return the message without null fields: in parquet every message has the fields of all
    messages.  Raises DataError for a value that is no message.
    """
    if not (
        isinstance(message, dict)
        and all(isinstance(message.get(k), str) for k in ("role", "content"))
    ):
        raise DataError(f"{key!r} must be text, or chat messages {{'role': text, 'content': text}}")
    check_text(message["content"], key)
    return {name: value for name, value in message.items() if value is not None}


def label_text(row: JsonRow, key: str) -> str:
    """Return the label as text, a number without an exponent: 0.00001, not "1e-05"."""
    label = required(row, key)
    # bool is an int in Python, but as a label it is most likely a mistake
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        hint = f"; {key}.0 is the first of a list" if isinstance(label, list) else ""
        raise DataError(f"{key!r} must be text or a number, got {kind(label)}{hint}")
    if isinstance(label, float) and not math.isfinite(label):
        raise DataError(f"{key!r} must be finite, got {label}")
    if isinstance(label, float):
        return format(decimal.Decimal(repr(label)), "f")
    check_text(str(label), key)
    return str(label)


def metadata_of(row: JsonRow, keys: tuple[str, str], limit: int) -> JsonRow:
    """Return the columns of a row without its prompt, label and id, and without empty columns.

    The column of a dotted key is kept.  Dates, decimals and UUIDs, which JSON does not have, become
    text.
    limit: data.max_metadata_bytes; with 0 nothing is kept.
    """
    if not limit:
        return {}
    left_out = (*keys, "id")
    kept = {key: value for key, value in row.items() if key not in left_out and value is not None}
    if not kept:
        return {}
    text = json.dumps(kept, default=to_json)
    if len(text) > limit:  # reward functions get it with every response
        sizes = {name: len(json.dumps(value, default=to_json)) for name, value in kept.items()}
        key, size = max(sizes.items(), key=lambda pair: pair[1])
        raise DataError(
            f"the columns besides prompt and label take {len(text)} bytes as JSON,"
            f" data.max_metadata_bytes = {limit} (the longest is {key!r} with {size}); raise the"
            " limit, leave out the column, or set 0 to keep none of them"
        )
    return json.loads(text)


TEXT_TYPES = datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID
"""Types of parquet values that become text in JSON."""


def to_json(value: object) -> str:
    if isinstance(value, TEXT_TYPES):
        return str(value)
    raise DataError(
        f"a column has a value of type {kind(value)}, which is not JSON; leave out the column, or"
        " set data.max_metadata_bytes = 0 to keep no further columns"
    )


def check_text(text: str, key: str) -> None:
    """Raise DataError for text that is empty or not valid Unicode."""
    if not text.strip():
        raise DataError(f"{key!r} must be text that is not empty, got {text!r}")
    checked_unicode(text, key)


def checked_unicode(text: str, key: str) -> str:
    """Return the text; raise DataError where it is not valid Unicode, which tokenizers, files and
    servers refuse.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{key!r} has half a character at position {error.start} (a lone surrogate)"
        ) from error
    return text


def kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
