"""The rollouts of a run in an SQLite file, so that any of a million is found without reading the
others.

Tables: `files`, how far each jsonl was read; `rollouts`, one row per sequence, numbers and short
texts only; `texts`, what a table shows of prompt and response; `search`, full text of both (FTS5,
the texts themselves stay in the jsonl); `trained`, lines of the trainer's half; `groups`, per
(step, prompt); `shards`, which safetensors files were read for ids. A step that a resumed run wrote
again replaces its earlier rows.  One transaction holds rows and the place in the file after
them: a viewer that is killed continues where it was, and two viewers of one run do not disturb each
other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from urllib.parse import quote

from megatron_rl_viewer.follow import (
    FilePlace,
    Line,
    after,
    batch_of,
    cut_line,
    is_rewritten,
    new_lines,
)
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, shard_files, tensor_file_name

VERSION = 1  # of the tables below: another one is built again
BATCH = 5000  # lines per transaction
BATCH_BYTES = 32 * 2**20  # after which no further line is added to it
SHOWN_CHARACTERS = 200
MAX_WARNINGS = 20  # per file
TRAINED_NUMBERS = ("kl", "max_log_ratio", "clipped_frac", "flip_frac")
INDEXED = (
    "step", "reward", "advantage", "length", "finish_reason", "version", "turns", "has_tensors",
    *TRAINED_NUMBERS,
)  # fmt: skip
GROUP_INDEXED = (
    "count",
    "reward_mean",
    "reward_min",
    "reward_max",
    "length_mean",
    "flip_frac",
    "kl",
)
SCHEMA = f"""
CREATE TABLE files(name TEXT PRIMARY KEY, offset INT, lines INT, last_length INT, last_digest BLOB, last_step INT);
CREATE TABLE warnings(file TEXT, text TEXT);
CREATE TABLE rollouts(
    number INTEGER PRIMARY KEY, step INT, file TEXT, id TEXT, group_key TEXT, episode TEXT, offset INT, size INT,
    reward REAL, advantage REAL, length INT, finish_reason TEXT, version INT, versions TEXT, turns INT,
    has_tensors INT DEFAULT 0, kl REAL, max_log_ratio REAL, clipped_frac REAL, flip_frac REAL, UNIQUE(step, file, id));
CREATE INDEX rollouts_group ON rollouts(group_key);
CREATE TABLE texts(number INTEGER PRIMARY KEY, prompt TEXT, response TEXT);
CREATE VIRTUAL TABLE search USING fts5(prompt, response, content='');
CREATE TABLE trained(
    step INT, id TEXT, file TEXT, line TEXT, kl REAL, max_log_ratio REAL, clipped_frac REAL, flip_frac REAL,
    PRIMARY KEY(step, id, file)) WITHOUT ROWID;
CREATE TABLE groups(
    number INTEGER PRIMARY KEY, step INT, file TEXT, key TEXT UNIQUE, first INT, count INT, reward_mean REAL,
    reward_min REAL, reward_max REAL, length_mean REAL, kl REAL, flip_frac REAL);
CREATE INDEX groups_step ON groups(step);
CREATE TABLE shards(name TEXT PRIMARY KEY, size INT, modified INT, error TEXT);
{"".join(f"CREATE INDEX rollouts_{name} ON rollouts({name});" for name in INDEXED)}
{"".join(f"CREATE INDEX groups_{name} ON groups({name});" for name in GROUP_INDEXED)}
PRAGMA user_version = {VERSION};
"""
ROW = """INSERT OR REPLACE INTO rollouts(number, file, step, id, group_key, episode, offset, size, reward, advantage, length,
    finish_reason, version, versions, turns) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
JOIN_TRAINED = f"""UPDATE rollouts SET {", ".join(f"{name} = t.{name}" for name in TRAINED_NUMBERS)} FROM trained AS t
    WHERE rollouts.step = ? AND t.step = rollouts.step AND t.id = rollouts.id AND t.file IN (rollouts.file, '')"""
GROUP_ROWS = """INSERT INTO groups(step, file, key, first, count, reward_mean, reward_min, reward_max, length_mean, kl, flip_frac)
    SELECT step, file, group_key, min(number), count(CASE episode WHEN '' THEN 1 END),
        avg(CASE episode WHEN '' THEN reward END), min(reward), max(reward), avg(length), avg(kl), avg(flip_frac)
    FROM rollouts WHERE step = ? GROUP BY file, group_key ORDER BY min(number)"""


def rollout_key(step: int, file: str, name: str) -> str:
    """Names a rollout, or with the id of a prompt a group, in URLs: "12/rollouts/Q7%2F3"."""
    return f"{step}/{file}/{quote(name, safe='')}"


def database_path(folder: Path, cache: Path) -> Path:
    """One file per place of a run; that another run stands there now is noticed by its contents."""
    place = str(folder.resolve())
    return (
        cache
        / f"{folder.resolve().name}-{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}.sqlite"
    )


class Index:
    """The index of the run in `folder`, kept in `path`.

    `update` is called by one thread; readers open connections.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.progress: float | None = (
            0.0  # share that is read, until the first update ends and while a later one reads lines
        )
        self.revision = 0  # grows when rows that were there before are replaced
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds texts of the run
        if not self._is_known():
            self._build()
        with closing(self.connect()) as connection:  # what made them unreadable may be mended
            connection.execute("DELETE FROM shards WHERE error IS NOT NULL")

    def _is_known(self) -> bool:
        """Whether there is an index of this VERSION.

        Raises sqlite3.Error where that is not known, as for one that is locked.
        """
        if not self.path.exists():
            return False
        try:
            with closing(self.connect()) as connection:
                return connection.execute("PRAGMA user_version").fetchone()[0] == VERSION
        except sqlite3.DatabaseError as error:
            # the low byte of an extended code; not SQLite, or damaged: it is built again
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_NOTADB,
                sqlite3.SQLITE_CORRUPT,
            ):
                return False
            raise

    def _build(self) -> None:
        """An empty index, in a file that then takes its place: another viewer sees a complete one
        or none.
        """
        with TemporaryDirectory(dir=self.path.parent) as folder:
            temporary = Path(folder) / self.path.name
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA} COMMIT;")
            for end in ("-wal", "-shm"):  # of the one that it replaces
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)
            os.replace(temporary, self.path)

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        connection.executescript(
            "PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; PRAGMA temp_store = MEMORY;"
        )
        connection.row_factory = sqlite3.Row
        return connection

    def update(self, stop: Event | None = None) -> None:
        """Read what was written since the last call; `stop` ends it between two transactions."""
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
        """STEM.jsonl, STEM.dp1.jsonl ... of the run itself, in the order of the replicas."""
        name = re.compile(rf"{stem}(\.dp\d+)?\.jsonl")  # not a copy such as rollouts_old.jsonl
        found = [
            path
            for path in self.folder.glob(f"{stem}*.jsonl")
            if name.fullmatch(path.name) and is_inside(self.folder, path)
        ]
        return sorted(found, key=lambda path: (len(path.stem), path.stem))

    def _forget_rewritten(self, connection: sqlite3.Connection) -> None:
        """All of it, where a file is not the one that was read: rows of two runs must not be mixed."""
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
        # files of tensors come last
        return min(read / max(sum(path.stat().st_size for path in paths), 1), 0.99)

    def _read_batch(self, connection: sqlite3.Connection, path: Path) -> int:
        """Read a batch of lines in one transaction; returns how many."""
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
        """Insert the rows of `lines`; returns the step of the last."""
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
            # an attempt writes its rows of a step at once: what stands there from before is of one
            # that was abandoned
            if step != last_step or name in seen:
                flush()
                self._forget_attempt(
                    connection, step, path.stem, again=name if step == last_step else None
                )
                seen, last_step = self._ids(connection, step, path.stem), step
            seen.add(name)
            number += 1
            rows.append((number, path.stem, *row))
            texts.append(
                (number, searched_text(fields["prompt"]), searched_text(fields["response"]))
            )
            steps.add(step)
        flush()
        # they may have been read before these lines
        again = [(tensor_file_name(path.stem, step),) for step in steps]
        connection.executemany("DELETE FROM shards WHERE name = ?", again)
        self._finish_steps(connection, steps)
        return last_step

    def _ids(self, connection: sqlite3.Connection, step: int, file: str) -> set[str]:
        found = connection.execute(
            "SELECT id FROM rollouts WHERE step = ? AND file = ?", (step, file)
        )
        return {row["id"] for row in found}

    def _forget_attempt(
        self, connection: sqlite3.Connection, step: int, file: str, again: str | None
    ) -> None:
        """Delete the rows of an abandoned attempt, with the trainer's half.

        again: an id that the next attempt repeats right after the abandoned one.  Rows of the next
        one may stand before it: of a complete attempt there are as many groups as of the step
        before, of another one those up to the group of that id.
        """
        which = "step = ? AND file = ?"
        values: list[object] = [step, file]
        if again is not None:
            count = "SELECT count(DISTINCT group_key) FROM rollouts WHERE step = ? AND file = ?"
            expected = connection.execute(count, (step - 1, file)).fetchone()[0]
            rows = connection.execute(
                f"SELECT * FROM rollouts WHERE {which} ORDER BY number", values
            ).fetchall()
            groups = [
                list(members) for _, members in groupby(rows, key=lambda row: row["group_key"])
            ]
            repeated = next(
                place
                for place, members in enumerate(groups)
                if any(row["id"] == again for row in members)
            )
            last = max(repeated, expected - 1 if expected <= len(groups) else 0)
            values.append(groups[last][-1]["number"])
            which += " AND number <= ?"
        deleted = connection.execute(f"DELETE FROM rollouts WHERE {which}", values)
        if deleted.rowcount:
            self.revision += 1
            connection.execute(
                "DELETE FROM trained WHERE step = ? AND file IN (?, '')", (step, file)
            )
            trainer = "UPDATE rollouts SET " + ", ".join(
                f"{name} = NULL" for name in TRAINED_NUMBERS
            )
            connection.execute(f"{trainer} WHERE step = ? AND file = ?", (step, file))

    def _add_trained(
        self, connection: sqlite3.Connection, path: Path, lines: Sequence[Line], last_step: int
    ) -> int:
        """The trainer's half; `sampled_by` names the file of the rollout where ids are not unique
        over replicas.
        """
        steps: set[int] = set()
        rows = []
        for fields, row in self._parsed(
            connection, path, lines, "a line of the trainer's half", trained_row
        ):
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
        """(fields, row) of each line; one that is no such line is named in the warnings."""
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
        count = connection.execute(
            "SELECT count(*) FROM warnings WHERE file = ?", (file,)
        ).fetchone()[0]
        if count < MAX_WARNINGS:
            text = text if count < MAX_WARNINGS - 1 else f"{text}; further lines are not named"
            connection.execute("INSERT INTO warnings VALUES (?,?)", (file, searched_text(text)))

    def _finish_steps(self, connection: sqlite3.Connection, steps: set[int]) -> None:
        """What depends on all rows of a step: the trainer's numbers, the groups."""
        for step in sorted(steps):
            if connection.execute(
                "SELECT 1 FROM trained WHERE step = ? LIMIT 1", (step,)
            ).fetchone():
                connection.execute(JOIN_TRAINED, (step,))
            connection.execute("DELETE FROM groups WHERE step = ?", (step,))
            connection.execute(GROUP_ROWS, (step,))

    # Tensors --------------------------------------------------------------------------------------

    def _read_shards(self, connection: sqlite3.Connection) -> None:
        """Which rollouts have tensors, by the names in files that are new or changed; of a file
        that is gone none.
        """
        known = {
            row["name"]: tuple(row)
            for row in connection.execute("SELECT name, size, modified FROM shards")
        }
        found = {name: (name, size, modified) for name, size, modified in shard_files(self.folder)}
        for name in known.keys() - found.keys():
            self._set_shard(connection, name, [], None)
        for name, entry in found.items():
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
        """Which rollouts have their tensors in this file; entry: its row of `shards`, None for a
        file that is gone.
        """
        stem, _, step = name.removesuffix(".safetensors").rpartition("_")
        connection.execute("BEGIN IMMEDIATE")
        if stem.startswith("rollouts"):
            update = "UPDATE rollouts SET has_tensors = ? WHERE step = ? AND file = ?"
            connection.execute(update, (0, int(step), stem))
            connection.executemany(
                f"{update} AND id = ?", [(1, int(step), stem, each) for each in ids]
            )
        connection.execute("DELETE FROM shards WHERE name = ?", (name,))
        if entry is not None:
            connection.execute("INSERT INTO shards VALUES (?,?,?,?)", entry)
        connection.execute("COMMIT")

    @property
    def warnings(self) -> list[str]:
        with closing(self.connect()) as connection:
            found = [
                row["text"]
                for row in connection.execute("SELECT text FROM warnings ORDER BY rowid")
            ]
            found += [
                row["error"]
                for row in connection.execute("SELECT error FROM shards WHERE error IS NOT NULL")
            ]
            cut = [
                cut_line(path, self._place(connection, path.name))
                for path in self._jsonl("rollouts")
            ]
            cut += [
                cut_line(path, self._place(connection, path.name))
                for path in self._jsonl("trained")
            ]
        return found + ([] if self.progress is not None else [each for each in cut if each])


def is_inside(folder: Path, path: Path) -> bool:
    """Whether it is a file of the run, not a link to one outside."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


ToRow = Callable[[str, Line, dict], tuple]
"""(stem of the file, line, its fields) -> values of a row; ValueError, KeyError or TypeError for
another kind of line.
"""


def index_row(file: str, line: Line, fields: dict) -> tuple:
    """Values of ROW after number and file.

    A line of an older version names one policy_version for the entire response.
    """
    step, name, length = (
        integer(fields, "step"),
        text(fields, "id"),
        integer(fields, "response_length"),
    )
    integer(fields, "prompt_length", 0)
    _ = fields["prompt"], fields["response"]
    spans = fields.get("policy_versions") or [[fields.get("policy_version"), length]]
    versions = [
        version
        for version, tokens in spans
        if isinstance(tokens, int) and isinstance(version, int | None)
    ]
    if len(versions) != len(spans) or not all(
        version is None or -(2**63) <= version < 2**63 for version in versions
    ):
        raise ValueError(
            f"policy_versions = {spans}: must be [[version, tokens], ...], integers of 64 bits"
        )
    episode = text(fields, "episode", "")
    prompt = (episode or name).rpartition("/")[0]
    return (
        step, name, rollout_key(step, file, prompt), episode, line.offset, len(line.data),
        number_or_none(fields.get("reward")), number_or_none(fields.get("advantage")), length,
        text(fields, "finish_reason", ""), versions[0],
        ", ".join(str(version) for version in dict.fromkeys(versions)),
        integer(fields, "num_turns", 1),
    )  # fmt: skip


def trained_row(file: str, line: Line, fields: dict) -> tuple:
    """Values of `trained`.

    `sampled_by` names the file of the rollout: its id is unique in that file only.
    """
    if fields["schema"] != 1:
        raise ValueError(
            f"schema = {fields['schema']}: must be 1, which this version of the viewer reads"
        )
    sampled_by = text(fields, "sampled_by", "").removesuffix(".jsonl")
    numbers = [number_or_none(fields.get(name)) for name in TRAINED_NUMBERS]
    return integer(fields, "step"), text(fields, "id"), sampled_by, line.data.decode(), *numbers


def integer(fields: dict, name: str, default: int | None = None) -> int:
    value = fields[name] if default is None else fields.get(name, default)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise TypeError(f"{name} = {value!r}: must be an integer of 64 bits")
    return value


def text(fields: dict, name: str, default: str | None = None) -> str:
    value = fields[name] if default is None else fields.get(name, default)
    if not isinstance(value, str):
        raise TypeError(f"{name} = {value!r}: must be a text")
    value.encode()  # half a surrogate pair is no key
    return value


def number_or_none(value: object) -> float | None:
    """NaN and infinity, which json reads, are no numbers of a table."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def searched_text(value: object) -> str:
    """A prompt may be a list of messages.  Half a surrogate pair is no text that SQLite stores."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl"
