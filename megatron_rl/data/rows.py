"""Rows of a prompt file (jsonl, parquet), and the keys of a row's prompt and label: those of public
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

from megatron_rl.config import DataConfig

Message: TypeAlias = dict[str, Any]
"""{"role": text, "content": text} and whatever else a chat template reads."""
JsonRow: TypeAlias = dict[str, object]

AUTO = "auto"
PROMPT_KEYS = ("prompt", "messages", "problem", "question", "Problem", "Question")
LABEL_KEYS = ("label", "reward_model.ground_truth", "final_answer", "answer", "Answer")
"""Tried in this order for auto.  slime: prompt, label.  verl: prompt, reward_model.ground_truth.
AIME, AMC, MATH-500, HMMT: problem or question, answer."""
MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
MISSING = object()
MAX_ERRORS_SHOWN = 5


class DataError(ValueError):
    """Prompts that cannot be used; the message names file, line, key, value and rule."""


@dataclass(frozen=True)
class Row:
    """One prompt before it is rendered.  `messages` end with the one to answer, in data.template;
    keys: (prompt, label).

    metadata: the further columns, for reward functions; every value is JSON.
    """

    number: int
    id: str
    messages: tuple[Message, ...]
    label: str
    keys: tuple[str, str]
    metadata: JsonRow


@dataclass(frozen=True, order=True)
class BrokenRow:
    number: int
    why: str


def parse_rows(path: Path, config: DataConfig) -> Iterator[Row | BrokenRow]:
    """Every row of the file, in its order.  Raises DataError for a file that cannot be read."""
    keys: tuple[str, str] | None = None
    for number, raw in read_rows(path):
        try:
            row = parse_line(raw) if isinstance(raw, bytes) else raw
            keys = keys or resolve_keys(row, config.prompt_key, config.label_key)
            name = (
                f"{path.stem}:{number}"
                if row.get("id") is None
                else checked_unicode(str(row["id"]), "id")
            )
            messages, label = tuple(prompt_messages(row, keys[0], config)), label_text(row, keys[1])
            yield Row(
                number,
                name,
                messages,
                label,
                keys,
                metadata_of(row, keys, config.max_metadata_bytes),
            )
        except DataError as error:
            yield BrokenRow(number, str(error))


def check_rows(path: Path, config: DataConfig, most: int) -> None:
    """Raise DataError listing the broken ones of the first `most` rows, or that there is none."""
    rows = list(islice(parse_rows(path, config), most))
    broken = [row for row in rows if isinstance(row, BrokenRow)]
    if broken:
        raise DataError(describe_broken_rows(path, broken))
    if not rows:
        raise DataError(f"{path}: no prompts in it")


def describe_broken_rows(path: Path, broken: Sequence[BrokenRow]) -> str:
    """The first few broken rows, and how many more there are."""
    lines = [
        f"{path}, {unit(path)} {row.number}: {row.why}" for row in sorted(broken)[:MAX_ERRORS_SHOWN]
    ]
    more = len(broken) - MAX_ERRORS_SHOWN
    return "\n".join([*lines, f"... and {more} more"] if more > 0 else lines)


def read_rows(path: Path) -> Iterator[tuple[int, JsonRow | bytes]]:
    """(line or row number from 1, the row or its bytes); blank lines of a jsonl file are skipped."""
    if not path.is_file():
        raise DataError(
            f"{path}: cannot be read: {'it is a directory' if path.is_dir() else 'No such file'}"
        )
    if path.suffix == ".parquet":
        import pyarrow.parquet  # takes 0.3 s: not for jsonl files

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
    """How messages call a row of the file."""
    return "row" if path.suffix == ".parquet" else "line"


def parse_line(line: bytes) -> JsonRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # Windows editors write a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"expected an object with keys, got {kind(row)}")
    return row


def resolve_keys(row: JsonRow, prompt_key: str, label_key: str) -> tuple[str, str]:
    """The keys of a file, from its first row: for "auto" the first known one that the row has, else
    the first.
    """

    def resolve(key: str, known: Sequence[str]) -> str:
        if key != AUTO:
            return key
        return next((name for name in known if lookup(row, name) not in (MISSING, None)), known[0])

    return resolve(prompt_key, PROMPT_KEYS), resolve(label_key, LABEL_KEYS)


def lookup(row: object, key: str) -> object:
    """The value at `key`: a key of exactly that name, or a path of keys and list indices joined by
    dots; else MISSING.
    """
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


def required(row: JsonRow, key: str) -> object:
    value = lookup(row, key)
    if value is MISSING:
        raise DataError(f"key {key!r} is missing; it has {list(row)}")
    return value


def prompt_messages(row: JsonRow, key: str, config: DataConfig) -> list[Message]:
    """The row's chat, or its text as a chat of one message; the last one is put into data.template."""
    prompt = required(row, key)
    for media in MEDIA_KEYS:
        if row.get(media):
            raise DataError(
                f"{media!r} is not empty: prompts are text only; leave out rows with images, video"
                " or audio"
            )
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


def checked_message(message: object, key: str) -> Message:
    """The message without its null fields: in parquet every message has the fields of all."""
    if not (
        isinstance(message, dict)
        and all(isinstance(message.get(k), str) for k in ("role", "content"))
    ):
        raise DataError(f"{key!r} must be text, or chat messages {{'role': text, 'content': text}}")
    check_text(message["content"], key)
    return {name: value for name, value in message.items() if value is not None}


def label_text(row: JsonRow, key: str) -> str:
    """The label as text; of a number, its str()."""
    label = required(row, key)
    # bool is an int in Python; as a label it is most likely a mistake
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        hint = f"; {key}.0 is the first of a list" if isinstance(label, list) else ""
        raise DataError(f"{key!r} must be text or a number, got {kind(label)}{hint}")
    if isinstance(label, float) and not math.isfinite(label):
        raise DataError(f"{key!r} must be finite, got {label}")
    check_text(str(label), key)
    return str(label)


def metadata_of(row: JsonRow, keys: tuple[str, str], limit: int) -> JsonRow:
    """The columns of a row but for those of its prompt, label and id, and empty ones.  limit:
    data.max_metadata_bytes; 0: none.

    The column of a dotted key is kept.  Dates, decimals and UUIDs, which parquet has and JSON has
    not, become text.
    """
    kept = (
        {key: value for key, value in row.items() if key not in (*keys, "id") and value is not None}
        if limit
        else {}
    )
    if not kept:
        return {}
    text = json.dumps(kept, default=to_json)
    if len(text) > limit:
        key, size = max(
            ((key, len(json.dumps(kept[key], default=to_json))) for key in kept),
            key=lambda pair: pair[1],
        )
        raise DataError(
            f"the columns besides prompt and label take {len(text)} bytes as JSON,"
            f" data.max_metadata_bytes = {limit} (the longest is {key!r} with {size}); raise the"
            " limit, leave out the column, or set 0 to keep none of them"
        )
    return json.loads(text)


def to_json(value: object) -> str:
    if isinstance(
        value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID
    ):
        return str(value)
    raise DataError(
        f"a column has a value of type {kind(value)}, which is not JSON; leave out the column, or"
        " set data.max_metadata_bytes = 0 to keep no further columns"
    )


def check_text(text: str, key: str) -> None:
    """Raise DataError for text that is empty, and as `checked_unicode`."""
    if not text.strip():
        raise DataError(f"{key!r} must be text that is not empty, got {text!r}")
    checked_unicode(text, key)


def checked_unicode(text: str, key: str) -> str:
    """The text; DataError where it is not valid Unicode, which tokenizers, files and servers
    refuse.
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
