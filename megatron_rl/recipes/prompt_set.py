"""A set of prompts of a recipe: where it comes from, its rows, and those that are left out.

A row is {"id", "prompt", "label"} and what else the reward function reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from megatron_rl.config import DataConfig
from megatron_rl.data.rows import (
    BrokenRow,
    DataError,
    describe_broken_rows,
    label_text,
    parse_line,
    prompt_messages,
    read_rows,
)
from megatron_rl.recipes.formats import Convert, Row, reader_of

SHOWN = 3
"""Rows that are left out for one reason and named."""
LEAST_ENDING, LEAST_ROWS = 20, 8
"""Characters and prompts from which on a common ending is reported as an instruction."""
REPEATED = "its prompt is also in an earlier row"
CONFLICT = "its prompt has another label in another row: which is right is not known"


@dataclass(frozen=True)
class Source:
    """A set of prompts on the Hugging Face hub, and how its rows are read."""

    repository: str
    file: str
    """The file of the repository, .parquet or .jsonl."""
    columns: Mapping[str, type]
    """The columns of its rows, which `convert` reads."""
    convert: Convert
    """A row -> {"prompt", "label"}, and what else the reward function reads.  Raises ValueError for
    a row that cannot be used."""
    num_rows: int | None = None
    """The number of rows that it had when the recipe was written."""
    generate: Callable[[], Iterable[Row]] | None = None
    """Makes the rows on this machine; then `repository` names a package, and `file` is not used."""

    def read(self) -> Iterable[Row]:
        """Return the rows, generated or from the hub."""
        return self.generate() if self.generate else download(self)

    @property
    def without_network(self) -> str:
        """What to do on a machine without a network."""
        folder = self.repository.rpartition("/")[2]
        return (
            f"without a network, on a machine that has one: hf download {self.repository}"
            f" {self.file} --repo-type dataset --local-dir {folder}; copy {folder}/{self.file} here"
            " and run prepare.py --from SET=FILE ..."
        )


@dataclass
class PromptSet:
    """The rows of a set, and the number of those that were left out."""

    name: str
    origin: str
    """The file, or the repository."""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of rows."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> ids of the first of these rows."""

    def leave_out(self, reason: str, row: Row) -> None:
        """Count a row that is not in `rows`."""
        self.left_out[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(str(row["id"]))

    def keep(self, wanted: Callable[[Row], str | None]) -> None:
        """Leave out the rows for which `wanted` returns a reason.  Raises DataError where none
        remains.
        """
        kept = []
        for row in self.rows:
            if reason := wanted(row):
                self.leave_out(reason, row)
            else:
                kept.append(row)
        self.rows = kept
        if not kept:
            why = "; ".join(f"{count:,}: {reason}" for reason, count in self.left_out.items())
            raise DataError(f"{self.name}: no row of {self.origin} is left ({why})")

    def lines(self) -> Iterator[str]:
        """Yield what is in the set, and what was left out of it."""
        total = len(self.rows) + self.left_out.total()
        yield f"{self.name}: {total:,} rows of {self.origin}"
        yield from (f"  {note}" for note in self.notes)
        for reason, count in self.left_out.items():
            names = ", ".join(self.examples[reason]) + (", ..." if count > SHOWN else "")
            yield f"  left out {count:,}: {reason} ({names})"

    def write(self, folder: Path) -> str:
        """Write FOLDER/NAME.jsonl whole or not at all, and return a line about it."""
        folder.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{json.dumps(row)}\n" for row in self.rows).encode()
        path, unfinished = folder / f"{self.name}.jsonl", folder / f".{self.name}.jsonl"
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
        digest = hashlib.sha256(content).hexdigest()
        return f"wrote {path}: {len(self.rows):,} rows, sha256 {digest}"


def read_set(name: str, source: Source, path: Path | None, data: DataConfig) -> PromptSet:
    """Read, convert and check the rows of one set, from a file or from the hub; leave out repeated
    prompts.

    Raises DataError that names the first broken rows, or the columns of a file that is not
    recognised.
    """
    prompts = PromptSet(name, str(path or source.repository))
    digest, broken, number = hashlib.sha256(), list[BrokenRow](), 0
    convert: Convert | None = None
    places: dict[str, str] = {}
    conflicts: set[str] = set()
    for number, raw in enumerate(read_file(path) if path else source.read(), 1):
        digest.update(json.dumps(raw, sort_keys=True, default=str).encode())
        if convert is None:
            convert, note = reader_of(raw, source.repository, source.columns, source.convert)
            prompts.notes.append(note)
        try:
            row = converted(raw, convert, f"{name}-{number}", data)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            broken.append(BrokenRow(number, str(error) or repr(error)))
            continue
        key = plain(row["prompt"])
        if key not in places:
            places[key] = row["label"]
            prompts.rows.append(row)
        else:
            prompts.leave_out(REPEATED, row)
            conflicts |= {key} if places[key] != row["label"] else set()
    check_rows(prompts, broken, number)
    prompts.notes.insert(0, f"sha256 of its rows: {digest.hexdigest()}")
    if source.num_rows not in (None, number):
        prompts.notes.append(f"{source.repository} had {source.num_rows:,} rows: another version?")
    prompts.keep(lambda row: CONFLICT if plain(row["prompt"]) in conflicts else None)
    if ending := common_ending(prompts.rows):
        prompts.notes.append(
            f"every prompt ends with {ending!r}; data.template adds its own instruction: to keep"
            ' only that of the file, set data.template = "{prompt}"'
        )
    return prompts


def check_rows(prompts: PromptSet, broken: Sequence[BrokenRow], number: int) -> None:
    """Raise DataError for a file of `number` rows that has none, or broken ones."""
    if not number:
        raise DataError(f"{prompts.name}: {prompts.origin} has no rows; copy it again")
    if broken:
        raise DataError(
            f"{prompts.name}: {len(broken):,} of {number:,} rows of {prompts.origin} cannot be"
            f" used:\n{describe_broken_rows(Path(prompts.origin), broken)}\ncorrect them, or delete"
            " them from the file"
        )


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a jsonl or parquet file.  Raises DataError that names a broken line."""
    for number, raw in read_rows(path):
        try:
            yield parse_line(raw) if isinstance(raw, bytes) else raw
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error


def download(source: Source) -> Iterable[Row]:
    """Return the rows of a file on the hub.  Raises DataError that says what to do without."""
    try:
        import datasets  # only here: an installed trainer does not have it
    except ImportError as error:
        raise DataError(
            f"{source.repository} is downloaded by the package datasets, which is missing ({error}"
            f"): pip install datasets; {source.without_network}"
        ) from error
    kind = "parquet" if source.file.endswith(".parquet") else "json"
    file = f"hf://datasets/{source.repository}/{source.file}"
    try:
        return datasets.load_dataset(kind, data_files=file, split="train")
    except Exception as error:  # errors of the hub, of http and of files have no common base
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"{source.repository} cannot be downloaded: {reason}; {source.without_network}"
        ) from error


def converted(raw: Row, convert: Convert, name: str, data: DataConfig) -> Row:
    """Return the row as it is written.  Raises DataError for one that a run would refuse."""
    row = {"id": name, **convert(raw)}
    prompt_messages(row, "prompt", data)
    return row | {"label": label_text(row, "label")}


def text_of(prompt: str | list[dict[str, str]]) -> str:
    """Return the text of a prompt, or of its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def plain(prompt: str | list[dict[str, str]], ignored: Sequence[str] = ()) -> str:
    """Return all messages of a prompt as text for comparison: case and white space do not count.

    ignored: roles whose messages do not count.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    words = [
        f"{message['role']}: {message['content']}".split()
        for message in messages
        if message["role"] not in ignored
    ]
    return "\n".join(map(" ".join, words)).casefold()


def common_ending(rows: Sequence[Row]) -> str:
    """Return the text with which all prompts end, if it is long enough to be an instruction."""
    if len(rows) < LEAST_ROWS:
        return ""
    # all texts lie between the smallest and the largest
    texts = sorted(text_of(row["prompt"])[::-1] for row in rows)
    letters = takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
    ending = "".join(letter for letter, _ in letters)[::-1].strip()
    return ending if len(ending) >= LEAST_ENDING else ""
