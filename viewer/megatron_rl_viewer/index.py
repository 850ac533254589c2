"""The rollouts of a run in an SQLite file, so that any of a million is found without reading the
others.

A step that a resumed run wrote again replaces its earlier rows.  One transaction holds rows and the
place in the file after them, so that a killed viewer continues where it was, and two viewers of one
run do not disturb each other.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from megatron_rl.config.run_paths import RunFolder, StepFile
from megatron_rl_viewer.follow import Line, after, batch_of, cut_line, new_lines, stat_of
from megatron_rl_viewer.index_files import FileEntry, finish_steps, forget_rewritten, known_files
from megatron_rl_viewer.index_rows import (
    ToRow,
    index_row,
    number_or_none,
    parsed,
    searched_text,
    trained_row,
)
from megatron_rl_viewer.index_schema import (
    ROW,
    SCHEMA,
    TRAINED_NUMBERS,
    VERSION,
    make_indexes,
)
from megatron_rl_viewer.tensor_files import (
    ShardError,
    TensorFile,
    own_files,
    shard_files,
    tensor_file_name,
)

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
        connection.create_function("to_float32", 1, number_or_none, deterministic=True)
        connection.row_factory = sqlite3.Row
        return connection

    def update(self, stop: Event | None = None) -> None:
        """Read what was written since the last call; `stop` ends that between two transactions."""
        try:
            with closing(self.connect()) as connection:
                files = self._line_files()
                self.revision += forget_rewritten(connection, self.folder, files)
                if self._read_lines(connection, files, stop):
                    make_indexes(connection)
                    self._read_shards(connection)
        finally:
            self.progress = None

    # Lines ----------------------------------------------------------------------------------------

    def _line_files(self) -> list[StepFile]:
        """Return the run's files of lines: of each step the rollouts, then the trainer's half."""
        run = RunFolder(self.folder)
        files = [*run.line_files("rollouts"), *run.line_files("trained")]
        return sorted(own_files(self.folder, files), key=lambda file: (file.step, file.half))

    def _read_lines(
        self, connection: sqlite3.Connection, files: Sequence[StepFile], stop: Event | None
    ) -> bool:
        """Read the files that changed, and return whether nothing is left, not even by `stop`."""
        known = known_files(connection)
        sizes = {file.name: stat_of(file.path) for file in files}
        total = max(sum(size for size, _ in sizes.values()), 1)
        read = sum(entry.place.offset for entry in known.values())
        for file in files:
            if file.name in known and known[file.name].stat == sizes[file.name]:
                continue
            while more := self._read_batch(connection, file, sizes[file.name]):
                if stop and stop.is_set():
                    return False
                read += more
                # at most 0.99: tensor files are read last
                self.progress = min(read / total, 0.99)
        return True

    def _read_batch(
        self, connection: sqlite3.Connection, file: StepFile, stat: tuple[int, int]
    ) -> int:
        """Read a batch of lines in one transaction and return their bytes."""
        connection.execute("BEGIN IMMEDIATE")  # before the place is read: another viewer may write
        try:
            entry = known_files(connection, file.name).get(file.name, FileEntry())
            lines = batch_of(new_lines(file.path, entry.place), BATCH, BATCH_BYTES)
            place, last_step = entry.place, entry.last_step
            if lines:
                add = self._add_rollouts if file.half == "rollouts" else self._add_trained
                last_step = add(connection, file, lines, last_step)
                place = after(place, lines[-1])
            # the size says that all is read: only after a batch that found nothing more
            read = (0, 0) if lines else stat
            values = (file.name, *astuple(place), last_step, *read)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?,?,?,?,?,?,?,?)", values)
            connection.execute("COMMIT")
        except BaseException:
            # an error of SQLite may have rolled back already
            with suppress(sqlite3.OperationalError):
                connection.execute("ROLLBACK")
            raise
        return place.offset - entry.place.offset

    def _add_rollouts(
        self, connection: sqlite3.Connection, file: StepFile, lines: Sequence[Line], last_step: int
    ) -> int:
        """Insert the rows of `lines` and return the step of the last one."""
        number = connection.execute("SELECT coalesce(max(number), 0) FROM texts").fetchone()[0]
        rows: list[tuple] = []
        texts: list[tuple] = []
        steps: set[int] = set()
        writer = file.writer

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

        seen = self._ids(connection, last_step, writer)
        for fields, row in self._parsed(connection, file, lines, "a rollout", index_row):
            step, name = fields["step"], fields["id"]
            # a run writes its rows of a step at once: earlier rows are of an abandoned attempt
            if step != last_step or name in seen:
                flush()
                again = name if step == last_step else None
                self._forget_attempt(connection, step, writer, again=again)
                seen, last_step = self._ids(connection, step, writer), step
            seen.add(name)
            number += 1
            rows.append((number, writer, *row))
            prompt, response = searched_text(fields["prompt"]), searched_text(fields["response"])
            texts.append((number, prompt, response))
            steps.add(step)
        flush()
        # read the steps' tensor files again: they may have been read before these lines
        files = [(tensor_file_name(self.folder, writer, step),) for step in steps]
        connection.executemany("DELETE FROM shards WHERE name = ?", files)
        finish_steps(connection, steps)
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
        self, connection: sqlite3.Connection, file: StepFile, lines: Sequence[Line], last_step: int
    ) -> int:
        """Insert lines of the trainer's half and return the step of the last one."""
        steps: set[int] = set()
        rows = []
        what = "a line of the trainer's half"
        for fields, row in self._parsed(connection, file, lines, what, trained_row):
            rows.append(row)
            steps.add(fields["step"])
            last_step = fields["step"]
        connection.executemany("INSERT OR REPLACE INTO trained VALUES (?,?,?,?,?,?,?,?)", rows)
        finish_steps(connection, steps)
        return last_step

    def _parsed(
        self,
        connection: sqlite3.Connection,
        file: StepFile,
        lines: Sequence[Line],
        what: str,
        to_row: ToRow,
    ) -> Iterator[tuple[dict, tuple]]:
        """Yield (fields, row) of each line; a warning names each line that is not `what`."""
        for line in lines:
            if not line.data.strip():
                continue
            try:
                fields = parsed(line.data)
                row = to_row(file.writer, line, fields)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else error
                self._warn(connection, file.name, f"{file.name}:{line.number}: not {what}: {why}")
                continue
            yield fields, row

    def _warn(self, connection: sqlite3.Connection, file: str, text: str) -> None:
        select = "SELECT count(*) FROM warnings WHERE file = ?"
        count = connection.execute(select, (file,)).fetchone()[0]
        if count < MAX_WARNINGS:
            text = text if count < MAX_WARNINGS - 1 else f"{text}; further lines are not named"
            connection.execute("INSERT INTO warnings VALUES (?,?)", (file, searched_text(text)))

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
        file = RunFolder(self.folder).file_named(name)
        connection.execute("BEGIN IMMEDIATE")
        if file and file.half == "rollouts":
            update = "UPDATE rollouts SET has_tensors = ? WHERE step = ? AND file = ?"
            connection.execute(update, (0, file.step, file.writer))
            rows = [(1, file.step, file.writer, rollout) for rollout in ids]
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
            if self.progress is not None:
                return texts  # more bytes follow because not all are read yet
            known = known_files(connection)
        # a file of one step is complete or not there
        files = [file for file in self._line_files() if file.has_all_steps]
        entries = [(file, known.get(file.name, FileEntry())) for file in files]
        cut = [cut_line(file.path, entry.place) for file, entry in entries]
        return texts + [text for text in cut if text]


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether it is a file of the run, not a link to one outside."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl"
