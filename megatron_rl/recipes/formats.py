"""Columns of prompt files: those that a recipe expects, and those of other trainers, which are
recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megatron_rl.config import DataConfig
from megatron_rl.data.rows import (
    MISSING,
    DataError,
    kind,
    label_text,
    lookup,
    prompt_messages,
    required,
)

Row: TypeAlias = dict[str, Any]
Convert: TypeAlias = Callable[[Row], Row]
NAMES: Mapping[type, str] = {str: "text", int: "a number", list: "a list", dict: "an object"}
"""Types in messages."""


@dataclass(frozen=True)
class Format:
    """The columns of a kind of prompt file; each may be a path, reward_model.ground_truth."""

    name: str
    prompts: Sequence[str]
    labels: Sequence[str]

    def keys(self, row: Row) -> tuple[str, str] | None:
        """Return the columns of prompt and label that the row has; None where one is missing."""
        prompt, label = (
            next((key for key in keys if lookup(row, key) not in (MISSING, None)), None)
            for keys in (self.prompts, self.labels)
        )
        return (prompt, label) if prompt and label else None


FORMATS = (
    Format("verl", ("prompt",), ("reward_model.ground_truth",)),
    Format("slime, or megatron_rl", ("prompt", "messages"), ("label",)),
    Format("OpenRLHF", ("context_messages", "input", "query"), ("label", "answer", "target")),
    Format("AIME, HMMT or MATH-500", ("problem", "Problem"), ("answer", "Answer")),
    Format("questions with answers", ("question", "Question"), ("answer", "Answer")),
)
"""Tried in this order: files of verl have a column named "prompt", too."""


def reader_of(
    first: Row, repository: str, columns: Mapping[str, type], convert: Convert
) -> tuple[Convert, str]:
    """Return the function that converts the rows of a file, by its first row, and a line that names
    the columns.

    Raises DataError for a file of no known kind.
    """
    if set(columns) <= set(first):

        def own(row: Row) -> Row:
            check_types(row, columns)
            return convert(row)

        return own, f"columns of {repository}: {', '.join(columns)}"
    for form in FORMATS:
        if keys := form.keys(first):
            return foreign(*keys), f"columns of {form.name}: prompt {keys[0]}, label {keys[1]}"
    raise DataError(
        f"its columns {list(first)} are those of no known prompt file; {repository} has"
        f" {list(columns)}; rename columns to prompt and label, or change convert and its columns"
        " in prepare.py"
    )


def check_types(row: Row, columns: Mapping[str, type]) -> None:
    """Raise DataError where a column is missing or of another type."""
    for name, wanted in columns.items():
        value = required(row, name)
        if not isinstance(value, wanted) or isinstance(value, bool):
            names = NAMES.get(wanted, wanted.__name__)
            raise DataError(f"{name!r} must be {names}, got {kind(value)} {value!r:.80}")


def foreign(prompt_key: str, label_key: str) -> Convert:
    """Return a function that reads the prompt and the label of another trainer's row."""
    data = DataConfig(train=Path("unused"))

    def read(row: Row) -> Row:
        messages = prompt_messages(row, prompt_key, data)
        is_text = isinstance(required(row, prompt_key), str)
        prompt = messages[-1]["content"] if is_text else messages
        return {"prompt": prompt, "label": label_text(row, label_key)}

    return read
