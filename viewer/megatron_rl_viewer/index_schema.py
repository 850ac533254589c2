"""The tables of the index, and the statements that fill them."""

from __future__ import annotations

import sqlite3

VERSION = 5
"""Version of the tables below; an index of another version is built again."""
TRAINED_NUMBERS = ("kl", "max_log_ratio", "clipped_frac", "flip_frac")
FLOAT32 = (
    "reward", "advantage", "reward_mean", "reward_min", "reward_max", *TRAINED_NUMBERS,
)  # fmt: skip
"""Columns whose values index_rows.to_float32 has rounded; what they are compared with is, too."""
INDEXED = (
    "step", "reward", "advantage", "length", "finish_reason", "version", "turns", "has_tensors",
    *TRAINED_NUMBERS,
)  # fmt: skip
GROUP_INDEXED = (
    "prompt_key", "count", "reward_mean", "reward_min", "reward_max", "length_mean", "flip_frac",
    "kl",
)  # fmt: skip
SCHEMA = f"""
CREATE TABLE files(
    name TEXT PRIMARY KEY, offset INT, lines INT, last_length INT, last_digest BLOB, last_step INT,
    size INT, modified INT);
CREATE TABLE warnings(file TEXT, text TEXT);
CREATE TABLE rollouts(
    number INTEGER PRIMARY KEY, step INT, file TEXT, id TEXT, group_key TEXT, episode TEXT,
    prompt_key TEXT, offset INT, size INT, reward REAL, advantage REAL, length INT,
    finish_reason TEXT, version INT, versions TEXT, turns INT, has_tensors INT DEFAULT 0,
    kl REAL, max_log_ratio REAL, clipped_frac REAL, flip_frac REAL, UNIQUE(step, file, id));
CREATE INDEX rollouts_group ON rollouts(group_key);
CREATE TABLE texts(number INTEGER PRIMARY KEY, prompt TEXT, response TEXT);
CREATE VIRTUAL TABLE search USING fts5(prompt, response, content='');
CREATE TABLE trained(
    step INT, id TEXT, file TEXT, line TEXT,
    kl REAL, max_log_ratio REAL, clipped_frac REAL, flip_frac REAL,
    PRIMARY KEY(step, id, file)) WITHOUT ROWID;
CREATE TABLE groups(
    number INTEGER PRIMARY KEY, step INT, file TEXT, key TEXT UNIQUE, prompt_key TEXT, first INT,
    count INT, reward_mean REAL, reward_min REAL, reward_max REAL, length_mean REAL, kl REAL,
    flip_frac REAL);
CREATE INDEX groups_step ON groups(step);
CREATE TABLE shards(name TEXT PRIMARY KEY, size INT, modified INT, error TEXT);
PRAGMA user_version = {VERSION};
"""
"""files: how far each jsonl was read.
rollouts: one row per sequence, with numbers and short texts.
texts: the beginnings of prompt and response that a table shows.
search: full text of both (FTS5; the texts themselves stay in the jsonl).
trained: lines of the trainer's half.
groups: one row per (step, prompt); prompt_key is the same in every step and run.
shards: safetensors files whose ids were read.
"""
SORTED_BY = {
    f"{table}_{name}": f"CREATE INDEX {table}_{name} ON {table}({name})"
    for table, names in (("rollouts", INDEXED), ("groups", GROUP_INDEXED))
    for name in names
}
"""Name of an index -> the statement that makes it, when all rows of a new run are there."""
ROW = """INSERT OR REPLACE INTO rollouts(
        number, file, step, id, group_key, episode, prompt_key, offset, size, reward, advantage,
        length, finish_reason, version, versions, turns)
    VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
JOIN_TRAINED = f"""UPDATE rollouts
    SET ({", ".join(TRAINED_NUMBERS)}) = (
        SELECT {", ".join(TRAINED_NUMBERS)} FROM trained AS t
        WHERE t.step = rollouts.step AND t.id = rollouts.id AND t.file IN (rollouts.file, '')
        ORDER BY t.file DESC LIMIT 1)
    WHERE step = ?"""
"""A subquery by t's primary key: a join reads all rows of the step for each of its rows."""
GROUP_ROWS = """INSERT INTO groups(
        step, file, key, prompt_key, first, count, reward_mean, reward_min, reward_max,
        length_mean, kl, flip_frac)
    SELECT step, file, group_key, min(prompt_key), min(number),
        count(CASE episode WHEN '' THEN 1 END),
        to_float32(avg(CASE episode WHEN '' THEN reward END)), min(reward), max(reward),
        1.0 * sum(length) / count(CASE episode WHEN '' THEN 1 END),
        to_float32(avg(kl)), to_float32(avg(flip_frac))
    FROM rollouts WHERE step = ? GROUP BY file, group_key ORDER BY min(number)"""
"""count, reward_mean and length_mean are of responses: an episode of several sequences is one, with
the length of all of them, as in rollout/response_length_mean."""


def make_indexes(connection: sqlite3.Connection) -> None:
    """Make the indexes by which tables are sorted, unless they exist.

    Rows that are added to an index one by one cost several times more, so the first reading of a
    run is done without them; tables are sorted by looking at every row until then.  Each is one
    transaction: pages are answered in between.
    """
    known = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")
    names = {row["name"] for row in known}
    for name, statement in SORTED_BY.items():
        if name not in names:
            connection.execute(statement)
