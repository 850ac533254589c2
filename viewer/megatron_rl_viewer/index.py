"""The rollouts of a run in an SQLite file, so that any of a million is found without reading the
others.

A step that a resumed run wrote again replaces its earlier rows.  One transaction holds rows and the
place in the file after them, so that a killed viewer continues where it was, and two viewers of one
run do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from megatron_rl_viewer.follow import (
    FilePlace,
    Line,
    after,
    batch_of,
    cut_line,
    is_rewritten,
    new_lines,
)
from megatron_rl_viewer.index_rows import ToRow, index_row, searched_text, trained_row
from megatron_rl_viewer.index_schema import (
    GROUP_ROWS,
    JOIN_TRAINED,
    ROW,
    SCHEMA,
    TRAINED_NUMBERS,
    VERSION,
)
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, shard_files, tensor_file_name

BATCH = 5000
"""Lines per transaction."""
BATCH_BYTES = 32 * 2**20
"""Bytes after which no further line is added to a transaction."""
SHOWN_CHARACTERS = 200
MAX_WARNINGS = 20
"""Warnings per file."""


def database_path(folder: Path, cache: Path) -> Path:
    """Return the index file of a run's folder.

    If another run is in the folder now, its contents show it (follow.is_rewritten).
    """
    place = folder.resolve()
    digest = hashlib.blake2b(str(place).encode(), digest_size=8).hexdigest()
    return cache / f"{place.name}-{digest}.sqlite"


class Index:
    """The index of the run in `folder`, stored in `path`.

    One thread calls `update`; readers open connections.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        # share that is read: until the first update ends, and while a later one reads lines
        self.progress: float | None = 0.0
        self.revision = 0  # grows when known rows are replaced
        path.parent.mkdir(
            mode=0o700, parents=True, exist_ok=True
        )  # private: it has the run's texts
        if not self._is_known():
            self._build()
        with closing(self.connect()) as connection:  # read damaged files again
            connection.execute("DELETE FROM shards WHERE error IS NOT NULL")

    def _is_known(self) -> bool:
        """Return whether there is an index of this VERSION.

        Raises sqlite3.Error if that cannot be read, for instance because the file is locked.
        """
        if not self.path.exists():
            return False
        try:
            with closing(self.connect()) as connection:
                return connection.execute("PRAGMA user_version").fetchone()[0] == VERSION
        except sqlite3.DatabaseError as error:
            # the low byte of an extended code; a damaged index is built again
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                return False
            raise

    def _build(self) -> None:
        """Make an empty index in another file and move it here, so that another viewer sees a
        complete one or none.
        """
        with TemporaryDirectory(dir=self.path.parent) as folder:
            temporary = Path(folder) / self.path.name
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA} COMMIT;")
            for end in ("-wal", "-shm"):  # they belong to the replaced file
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)
            os.replace(temporary, self.path)

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        # synchronous = OFF: an index that a crash damages is built again
        connection.executescript(
            "PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; PRAGMA temp_store = MEMORY;"
        )
        connection.row_factory = sqlite3.Row
        return connection

    def update(self, stop: Event | None = None) -> None:
        """Read what was written since the last call; `stop` ends that between two transactions."""
        try:
            with closing(self.connect()) as connection:
                self._forget_rewritten(connection)
                for path in [*self._jsonl("rollouts"), *self._jsonl("trained")]:
                    while self._read_batch(connection, path) and not (stop and stop.is_set()):
                        self.progress = self._share_read(connection)
                self._read_shards(connection)
        finally:
            self.progress = None

    # Lines ----------------------------------------------------------------------------------------

    def _jsonl(self, stem: str) -> list[Path]:
        """Return the run's STEM.jsonl, STEM.dp1.jsonl, ... in the order of the replicas."""
        name = re.compile(rf"{stem}(\.dp\d+)?\.jsonl")  # not a copy such as rollouts_old.jsonl
        paths = [
            path
            for path in self.folder.glob(f"{stem}*.jsonl")
            if name.fullmatch(path.name) and is_inside(self.folder, path)
        ]
        return sorted(paths, key=lambda path: (len(path.stem), path.stem))

    def _forget_rewritten(self, connection: sqlite3.Connection) -> None:
        """Empty the index if a file is not the one that was read: rows of two runs must not mix."""
        names = [row["name"] for row in connection.execute("SELECT name FROM files")]
        if any(is_rewritten(self.folder / name, self._place(connection, name)) for name in names):
            tables = ("files", "warnings", "rollouts", "texts", "trained", "groups", "shards")
            deletes = "".join(f"DELETE FROM {table};" for table in tables)
            connection.executescript(
                f"BEGIN IMMEDIATE; {deletes} INSERT INTO search(search) VALUES('delete-all');"
                " COMMIT;"
            )
            self.revision += 1

    def _place(self, connection: sqlite3.Connection, name: str) -> FilePlace:
        row = connection.execute(
            "SELECT offset, lines, last_length, last_digest FROM files WHERE name = ?", (name,)
        ).fetchone()
        return FilePlace(*row) if row else FilePlace()

    def _share_read(self, connection: sqlite3.Connection) -> float:
        paths = [*self._jsonl("rollouts"), *self._jsonl("trained")]
        read = connection.execute("SELECT sum(offset) FROM files").fetchone()[0] or 0
        # at most 0.99: tensor files are read last
        return min(read / max(sum(path.stat().st_size for path in paths), 1), 0.99)

    def _read_batch(self, connection: sqlite3.Connection, path: Path) -> int:
        """Read a batch of lines in one transaction and return their number."""
        connection.execute("BEGIN IMMEDIATE")  # before the place is read: another viewer may write
        try:
            place = self._place(connection, path.name)
            last = connection.execute(
                "SELECT last_step FROM files WHERE name = ?", (path.name,)
            ).fetchone()
            lines = batch_of(new_lines(path, place), BATCH, BATCH_BYTES)
            if lines:
                add = self._add_rollouts if path.name.startswith("rollouts") else self._add_trained
                last_step = add(connection, path, lines, last["last_step"] if last else -1)
                entry = (path.name, *astuple(after(place, lines[-1])), last_step)
                connection.execute("INSERT OR REPLACE INTO files VALUES (?,?,?,?,?,?)", entry)
            connection.execute("COMMIT")
        except BaseException:
            # an error of SQLite may have rolled back already
            with suppress(sqlite3.OperationalError):
                connection.execute("ROLLBACK")
            raise
        return len(lines)

    def _add_rollouts(
        self, connection: sqlite3.Connection, path: Path, lines: Sequence[Line], last_step: int
    ) -> int:
        """Insert the rows of `lines` and return the step of the last one."""
        number = connection.execute("SELECT coalesce(max(number), 0) FROM texts").fetchone()[0]
        rows: list[tuple] = []
        texts: list[tuple] = []
        steps: set[int] = set()

        def flush() -> None:
            connection.executemany(ROW, rows)
            shown = [
                (n, prompt[:SHOWN_CHARACTERS], response[:SHOWN_CHARACTERS])
                for n, prompt, response in texts
            ]
            connection.executemany("INSERT INTO texts VALUES (?,?,?)", shown)
            connection.executemany(
                "INSERT INTO search(rowid, prompt, response) VALUES (?,?,?)", texts
            )
            rows.clear()
            texts.clear()

        seen = self._ids(connection, last_step, path.stem)
        for fields, row in self._parsed(connection, path, lines, "a rollout", index_row):
            step, name = fields["step"], fields["id"]
            # a run writes its rows of a step at once: earlier rows are of an abandoned attempt
            if step != last_step or name in seen:
                flush()
                again = name if step == last_step else None
                self._forget_attempt(connection, step, path.stem, again=again)
                seen, last_step = self._ids(connection, step, path.stem), step
            seen.add(name)
            number += 1
            rows.append((number, path.stem, *row))
            prompt, response = searched_text(fields["prompt"]), searched_text(fields["response"])
            texts.append((number, prompt, response))
            steps.add(step)
        flush()
        # read the steps' tensor files again: they may have been read before these lines
        files = [(tensor_file_name(path.stem, step),) for step in steps]
        connection.executemany("DELETE FROM shards WHERE name = ?", files)
        self._finish_steps(connection, steps)
        return last_step

    def _ids(self, connection: sqlite3.Connection, step: int, file: str) -> set[str]:
        rows = connection.execute(
            "SELECT id FROM rollouts WHERE step = ? AND file = ?", (step, file)
        )
        return {row["id"] for row in rows}

    def _forget_attempt(
        self, connection: sqlite3.Connection, step: int, file: str, again: str | None
    ) -> None:
        """Delete the rows of an abandoned attempt, with the trainer's half.

        again: the first id that the next attempt repeats if it follows the abandoned one directly.
        Groups of the next attempt may precede this id, so only the abandoned groups are deleted: as
        many as the previous step has if the attempt was complete, else those up to this id's.
        """
        which = "step = ? AND file = ?"
        values: list[object] = [step, file]
        if again is not None:
            count = "SELECT count(DISTINCT group_key) FROM rollouts WHERE step = ? AND file = ?"
            expected = connection.execute(count, (step - 1, file)).fetchone()[0]
            select = f"SELECT * FROM rollouts WHERE {which} ORDER BY number"
            rows = connection.execute(select, values).fetchall()
            by_group = groupby(rows, key=lambda row: row["group_key"])
            groups = [list(members) for _, members in by_group]
            has_id = [any(row["id"] == again for row in members) for members in groups]
            repeated = has_id.index(True)
            last = max(repeated, expected - 1 if expected <= len(groups) else 0)
            values.append(groups[last][-1]["number"])
            which += " AND number <= ?"
        deleted = connection.execute(f"DELETE FROM rollouts WHERE {which}", values)
        if deleted.rowcount:
            self.revision += 1
            place = (step, file)
            connection.execute("DELETE FROM trained WHERE step = ? AND file IN (?, '')", place)
            nulls = ", ".join(f"{name} = NULL" for name in TRAINED_NUMBERS)
            connection.execute(f"UPDATE rollouts SET {nulls} WHERE step = ? AND file = ?", place)

    def _add_trained(
        self, connection: sqlite3.Connection, path: Path, lines: Sequence[Line], last_step: int
    ) -> int:
        """Insert lines of the trainer's half and return the step of the last one."""
        steps: set[int] = set()
        rows = []
        what = "a line of the trainer's half"
        for fields, row in self._parsed(connection, path, lines, what, trained_row):
            rows.append(row)
            steps.add(fields["step"])
            last_step = fields["step"]
        connection.executemany("INSERT OR REPLACE INTO trained VALUES (?,?,?,?,?,?,?,?)", rows)
        self._finish_steps(connection, steps)
        return last_step

    def _parsed(
        self,
        connection: sqlite3.Connection,
        path: Path,
        lines: Sequence[Line],
        what: str,
        to_row: ToRow,
    ) -> Iterator[tuple[dict, tuple]]:
        """Yield (fields, row) of each line; a warning names each line that is not `what`."""
        for line in lines:
            if not line.data.strip():
                continue
            try:
                fields = json.loads(line.data)
                row = to_row(path.stem, line, fields)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else error
                self._warn(connection, path.name, f"{path.name}:{line.number}: not {what}: {why}")
                continue
            yield fields, row

    def _warn(self, connection: sqlite3.Connection, file: str, text: str) -> None:
        select = "SELECT count(*) FROM warnings WHERE file = ?"
        count = connection.execute(select, (file,)).fetchone()[0]
        if count < MAX_WARNINGS:
            text = text if count < MAX_WARNINGS - 1 else f"{text}; further lines are not named"
            connection.execute("INSERT INTO warnings VALUES (?,?)", (file, searched_text(text)))

    def _finish_steps(self, connection: sqlite3.Connection, steps: set[int]) -> None:
        """Update what depends on all rows of a step: the trainer's numbers and the groups."""
        for step in sorted(steps):
            select = "SELECT 1 FROM trained WHERE step = ? LIMIT 1"
            if connection.execute(select, (step,)).fetchone():
                connection.execute(JOIN_TRAINED, (step,))
            connection.execute("DELETE FROM groups WHERE step = ?", (step,))
            connection.execute(GROUP_ROWS, (step,))

    # Tensors --------------------------------------------------------------------------------------

    def _read_shards(self, connection: sqlite3.Connection) -> None:
        """Mark the rollouts that have tensors, from the names in new or changed files.

        Rollouts of a file that is gone have none.
        """
        rows = connection.execute("SELECT name, size, modified FROM shards")
        known = {row["name"]: tuple(row) for row in rows}
        files = {name: (name, size, modified) for name, size, modified in shard_files(self.folder)}
        for name in known.keys() - files.keys():
            self._set_shard(connection, name, [], None)
        for name, entry in files.items():
            if known.get(name) == entry:
                continue
            error = None
            try:
                ids = TensorFile(self.folder, name).ids
            except ShardError as problem:
                error, ids = str(problem), []
            self._set_shard(connection, name, ids, (*entry, error))

    def _set_shard(
        self, connection: sqlite3.Connection, name: str, ids: Sequence[str], entry: tuple | None
    ) -> None:
        """Mark the rollouts that have their tensors in this file.

        entry: the file's row of `shards`; None if the file is gone.
        """
        stem, _, step = name.removesuffix(".safetensors").rpartition("_")
        connection.execute("BEGIN IMMEDIATE")
        if stem.startswith("rollouts"):
            update = "UPDATE rollouts SET has_tensors = ? WHERE step = ? AND file = ?"
            connection.execute(update, (0, int(step), stem))
            rows = [(1, int(step), stem, rollout) for rollout in ids]
            connection.executemany(f"{update} AND id = ?", rows)
        connection.execute("DELETE FROM shards WHERE name = ?", (name,))
        if entry is not None:
            connection.execute("INSERT INTO shards VALUES (?,?,?,?)", entry)
        connection.execute("COMMIT")

    @property
    def warnings(self) -> list[str]:
        with closing(self.connect()) as connection:
            lines = connection.execute("SELECT text FROM warnings ORDER BY rowid")
            texts = [row["text"] for row in lines]
            shards = connection.execute("SELECT error FROM shards WHERE error IS NOT NULL")
            texts += [row["error"] for row in shards]
            paths = [*self._jsonl("rollouts"), *self._jsonl("trained")]
            cut = [cut_line(path, self._place(connection, path.name)) for path in paths]
        if self.progress is not None:
            return texts  # more bytes follow because not all are read yet
        return texts + [text for text in cut if text]


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether it is a file of the run, not a link to one outside."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl"
