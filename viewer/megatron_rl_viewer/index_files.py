"""How far the index has read each file of lines, and what it forgets where one was written again.

A step that a resumed run wrote again has another file of the same name: only its rows are replaced.
A file of all steps (of the former layout) that is not the one that was read is of another run in
this folder: then the index is emptied.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config.run_paths import RunFolder, StepFile
from megatron_rl_viewer.follow import FilePlace, is_rewritten, stat_of
from megatron_rl_viewer.index_schema import GROUP_ROWS, JOIN_TRAINED, TRAINED_NUMBERS

TABLES = ("files", "warnings", "rollouts", "texts", "trained", "groups", "shards")
NO_TRAINED = ", ".join(f"{name} = NULL" for name in TRAINED_NUMBERS)


@dataclass(frozen=True)
class FileEntry:
    """A row of the table `files`."""

    place: FilePlace = field(default_factory=FilePlace)
    last_step: int = -1
    """Step of the last line that was read."""
    stat: tuple[int, int] = (0, 0)
    """Bytes and time of the last change, in ns, before it was read."""


def known_files(connection: sqlite3.Connection, name: str | None = None) -> dict[str, FileEntry]:
    """Return name -> how far it was read, for all files or for one."""
    where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
    rows = connection.execute(f"SELECT * FROM files{where}", values)
    return {
        row["name"]: FileEntry(
            FilePlace(row["offset"], row["lines"], row["last_length"], row["last_digest"]),
            row["last_step"],
            (row["size"], row["modified"]),
        )
        for row in rows
    }


def forget_rewritten(
    connection: sqlite3.Connection, folder: Path, files: Sequence[StepFile]
) -> bool:
    """Forget the rows of files that are gone or are not the ones that were read; return whether
    there were any.
    """
    present = {file.name: file for file in files}
    rewritten = [
        name for name, entry in known_files(connection).items()
        if name not in present
        or (stat_of(present[name].path) != entry.stat and is_another(present[name], entry))
    ]  # fmt: skip
    if not rewritten:
        return False
    gone = [file for name in rewritten if (file := RunFolder(folder).file_named(name))]
    connection.execute("BEGIN IMMEDIATE")
    if any(file.has_all_steps for file in gone):
        for table in TABLES:
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO search(search) VALUES('delete-all')")
    else:
        for file in gone:
            forget_file(connection, file, files)
        finish_steps(connection, {file.step for file in gone})
    connection.execute("COMMIT")
    return True


def is_another(file: StepFile, entry: FileEntry) -> bool:
    """Return whether a file that has changed is not the one that was read."""
    # lines of a step are written at once: answers of another attempt may be as long as the first's
    is_whole = file.half == "rollouts" and not file.has_all_steps
    # (0, 0): a part of it is read
    return (is_whole and entry.stat != (0, 0)) or is_rewritten(file.path, entry.place)


def forget_file(connection: sqlite3.Connection, gone: StepFile, files: Sequence[StepFile]) -> None:
    """Delete what was read of a step's file.

    Lines of the trainer do not name the file that they are in: those of all replicas about the step
    are read again.
    """
    if gone.half == "rollouts":
        place = (gone.step, gone.writer)
        connection.execute("DELETE FROM rollouts WHERE step = ? AND file = ?", place)
    connection.execute("DELETE FROM trained WHERE step = ?", (gone.step,))
    connection.execute(f"UPDATE rollouts SET {NO_TRAINED} WHERE step = ?", (gone.step,))
    of_trainer = [file for file in files if (file.half, file.step) == ("trained", gone.step)]
    for file in (gone, *of_trainer):
        connection.execute("DELETE FROM files WHERE name = ?", (file.name,))
        connection.execute("DELETE FROM warnings WHERE file = ?", (file.name,))


def finish_steps(connection: sqlite3.Connection, steps: Iterable[int]) -> None:
    """Update what depends on all rows of a step: the trainer's numbers and the groups."""
    for step in sorted(steps):
        select = "SELECT 1 FROM trained WHERE step = ? LIMIT 1"
        if connection.execute(select, (step,)).fetchone():
            connection.execute(JOIN_TRAINED, (step,))
        connection.execute("DELETE FROM groups WHERE step = ?", (step,))
        connection.execute(GROUP_ROWS, (step,))
