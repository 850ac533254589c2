"""Pages of the tables of rollouts and groups from the index: sorted, filtered and searched."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

import numpy as np

from megatron_rl_viewer.index_rows import rollout_key

MAX_LIMIT = 1000
MAX_OFFSET = 2**53
MAX_PARTS = 100
"""The most conditions, and the most words."""
MAX_TEXT = 10_000
"""The most characters of a text; SQLite refuses a pattern of 50,000."""
FEW = 5000
"""The most rows that SQLite sorts faster than it walks an index of all rows."""
OPERATORS = {"=": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "contains": "LIKE"}


class QueryError(ValueError):
    """Arguments that are not a valid query; the message names the argument, the value and the
    rule.
    """

    def __init__(self, text: str) -> None:
        # half a surrogate pair cannot be sent
        super().__init__(text.encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    label: str
    kind: Literal["number", "text", "share"]
    sql: str | None
    """The expression to filter and sort by; None for texts, which are searched instead."""
    is_float32: bool = False
    """True where recorded values are float32, so that 0.7 is 0.699999988."""


ROLLOUT_COLUMNS = {
    "step": Column("step", "number", "step"),
    "id": Column("id", "text", "id"),
    "prompt": Column("prompt", "text", None),
    "response": Column("response", "text", None),
    "reward": Column("reward", "number", "reward", is_float32=True),
    "advantage": Column("advantage", "number", "advantage", is_float32=True),
    "length": Column("tokens", "number", "length"),
    "kl": Column("KL(mu, pi_old)", "number", "kl"),
    "max_log_ratio": Column("largest log-ratio", "number", "max_log_ratio"),
    "clipped_frac": Column("clipped", "share", "clipped_frac"),
    "flip_frac": Column("flips", "share", "flip_frac"),
    "finish_reason": Column("finish reason", "text", "finish_reason"),
    "versions": Column("versions", "text", "version"),
    "turns": Column("turns", "number", "turns"),
    "has_tensors": Column("tensors", "number", "has_tensors"),
}
HIDDEN_FILTERS = {
    "group": Column("group", "text", "group_key"),
    "file": Column("file", "text", "file"),
}
HIDDEN_GROUP_FILTERS = {"key": Column("key", "text", "key"), "file": Column("file", "text", "file")}
GROUP_COLUMNS = {
    "step": Column("step", "number", "step"),
    "prompt": Column("prompt", "text", None),
    "count": Column("responses", "number", "count"),
    "reward_mean": Column("mean reward", "number", "reward_mean", is_float32=True),
    "reward_min": Column("least reward", "number", "reward_min", is_float32=True),
    "reward_max": Column("largest reward", "number", "reward_max", is_float32=True),
    "length_mean": Column("mean tokens", "number", "length_mean"),
    "kl": Column("KL(mu, pi_old)", "number", "kl"),
    "flip_frac": Column("flips", "share", "flip_frac"),
}
FOUND = "number IN (SELECT rowid FROM search WHERE search MATCH ?)"


@dataclass(frozen=True)
class Query:
    """The query of one page."""

    offset: int = 0
    limit: int = 100
    sort: str = "step"
    order: str = "desc"
    text: str = ""
    """Words that must all occur, each as the start of a word."""
    filters: Sequence[Mapping[str, object]] = ()
    """Conditions {"column", "op", "value"} that must all hold."""


def parse_filters(text: str) -> list[dict[str, object]]:
    """Parse the query argument `filter`."""
    try:
        filters = json.loads(text or "[]")
    except (ValueError, RecursionError) as error:
        raise QueryError(f"filter: not JSON: {error}") from error
    if not isinstance(filters, list) or not all(isinstance(entry, dict) for entry in filters):
        raise QueryError('filter: must be a list of {"column", "op", "value"}')
    return filters


def rollouts_page(connection: sqlite3.Connection, query: Query) -> dict:
    """Return {"total", "columns", "rows"}; a row has its key and that of its group."""
    where, values = conditions(query, {**ROLLOUT_COLUMNS, **HIDDEN_FILTERS}, FOUND)
    total, numbers = page_of(connection, "rollouts", ROLLOUT_COLUMNS, query, where, values)
    return {
        "total": total,
        "columns": describe_query(ROLLOUT_COLUMNS),
        "rows": rollout_rows(connection, numbers),
    }


def find_rollout(connection: sqlite3.Connection, key: str) -> sqlite3.Row | None:
    """Return the row of a key "STEP/FILE/ID", or None.

    The id may be percent-encoded or not, because a server decodes a path once.
    """
    step, _, place = key.partition("/")
    file, _, name = place.partition("/")
    if not (step.isascii() and step.isdecimal() and len(step) < 10):
        return None
    find = "SELECT * FROM rollouts WHERE step = ? AND file = ? AND id = ?"
    row = connection.execute(find, (int(step), file, unquote(name))).fetchone()
    return row or connection.execute(find, (int(step), file, name)).fetchone()


def rollout_rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[dict[str, object]]:
    """Return the rows of these numbers, in this order, as a table shows them.

    Rows that a rewritten step has replaced meanwhile are left out.
    """
    marks = ",".join("?" * len(numbers))
    rows = connection.execute(
        f"SELECT * FROM rollouts JOIN texts USING (number) WHERE number IN ({marks})", numbers
    )
    by_number = {row["number"]: rollout_row(row) for row in rows}
    return [by_number[number] for number in numbers if number in by_number]


def rollout_row(row: sqlite3.Row) -> dict[str, object]:
    shown = {name: row[name] for name in ROLLOUT_COLUMNS}
    shown |= {"has_tensors": bool(row["has_tensors"])}
    key = rollout_key(row["step"], row["file"], row["id"])
    hidden = {name: row[name] for name in ("episode", "prompt_key")}
    return shown | hidden | {"key": key, "group": row["group_key"]}


def groups_page(connection: sqlite3.Connection, query: Query) -> dict:
    has_words = f"key IN (SELECT group_key FROM rollouts WHERE {FOUND})"
    where, values = conditions(query, {**GROUP_COLUMNS, **HIDDEN_GROUP_FILTERS}, has_words)
    total, numbers = page_of(connection, "groups", GROUP_COLUMNS, query, where, values)
    marks = ",".join("?" * len(numbers))
    rows = connection.execute(
        f"SELECT groups.*, texts.prompt FROM groups LEFT JOIN texts ON texts.number = groups.first "
        f"WHERE groups.number IN ({marks})",
        numbers,
    )
    by_number = {
        row["number"]: {name: row[name] for name in ["key", *GROUP_COLUMNS]} for row in rows
    }
    shown = [by_number[number] for number in numbers if number in by_number]
    return {"total": total, "columns": describe_query(GROUP_COLUMNS), "rows": shown}


def describe_query(columns: Mapping[str, Column]) -> list[dict[str, object]]:
    return [
        {"name": name, "label": column.label, "kind": column.kind, "filter": column.sql is not None}
        for name, column in columns.items()
    ]


def page_of(
    connection: sqlite3.Connection,
    table: str,
    columns: Mapping[str, Column],
    query: Query,
    where: str,
    values: Sequence[object],
) -> tuple[int, list[int]]:
    """Return (number of rows that match, numbers of the rows of the page).

    Every column that can be sorted by has an index.  Empty values come last.
    """
    if not 0 <= query.offset <= MAX_OFFSET or not 0 < query.limit <= MAX_LIMIT:
        raise QueryError(
            f"offset = {query.offset}, limit = {query.limit}: must be >= 0, at most 2**53, and in"
            f" 1..{MAX_LIMIT}"
        )
    if query.order not in ("asc", "desc"):
        raise QueryError(f"order = {query.order}: must be asc or desc")
    if query.sort not in columns or columns[query.sort].sql is None:
        known = ", ".join(name for name, column in columns.items() if column.sql)
        raise QueryError(f"sort = {query.sort}: must be one of {known}")
    sql, order = columns[query.sort].sql, query.order.upper()
    total = connection.execute(f"SELECT count(*) FROM {table} {where}", values).fetchone()[0]
    plain = "+" if where and total <= FEW else ""  # SQLite uses no index for "+column"
    rows = connection.execute(
        f"SELECT number FROM {table} {where} ORDER BY {plain}{sql} {order} NULLS LAST, number"
        f" {order} LIMIT ? OFFSET ?",
        [*values, query.limit, query.offset],
    )
    return total, [row["number"] for row in rows]


def conditions(
    query: Query, columns: Mapping[str, Column], has_words: str
) -> tuple[str, list[object]]:
    """Return (WHERE clause or "", its values).

    has_words: the condition that a row has the searched words.  Column names and operators come
    from the tables above; values are always bound.
    """
    clauses: list[str] = []
    values: list[object] = []
    if len(query.filters) > MAX_PARTS:
        raise QueryError(f"filter: {len(query.filters)} conditions: must be at most {MAX_PARTS}")
    for entry in query.filters:
        name, operator, value = entry.get("column"), entry.get("op"), entry.get("value")
        column = columns.get(name) if isinstance(name, str) else None
        if column is None or column.sql is None:
            known = ", ".join(name for name, column in columns.items() if column.sql)
            raise QueryError(
                f"filter: column = {name}: must be one of {known}; texts are searched with q"
            )
        if not isinstance(operator, str) or operator not in OPERATORS:
            raise QueryError(f"filter: op = {operator}: must be one of {', '.join(OPERATORS)}")
        if not isinstance(value, str | int | float | bool):
            raise QueryError(f"filter: value = {value} of {name}: must be a number or a text")
        if operator == "contains":
            escaped = re.sub(r"([%_\\])", r"\\\1", usable_text("filter", value))
            clauses.append(f"{column.sql} LIKE ? ESCAPE '\\'")
            values.append(f"%{escaped}%")
        else:
            # "+" turns the index off: for a range, one pass over the rows is faster
            plain = "" if operator == "=" else "+"
            clauses.append(f"{plain}{column.sql} {OPERATORS[operator]} ?")
            values.append(filter_value(name, column, value))
    if query.text.strip():
        clauses.append(has_words)
        values.append(search_words(query.text))
    return ("WHERE " + " AND ".join(clauses) if clauses else ""), values


def filter_value(name: object, column: Column, value: str | int | float | bool) -> str | float:
    if column.kind == "text" and column.sql != "version":
        return usable_text("filter", value)
    try:
        number = float(value)
        with np.errstate(over="ignore"):  # above float32: infinite, as a reward would be
            return float(np.float32(number)) if column.is_float32 else number
    except (ValueError, OverflowError):
        raise QueryError(
            f"filter: value = {str(value)[:80]!r} of {name}: must be a number of at most 1e308"
        ) from None


def usable_text(argument: str, value: object) -> str:
    """Return the value as a text that SQLite accepts."""
    text = str(value)
    has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    if len(text) > MAX_TEXT or "\0" in text or has_surrogate:
        shown = text[:80].encode("ascii", "backslashreplace").decode()
        raise QueryError(
            f"{argument} = {shown!r}: must be at most {MAX_TEXT} characters of Unicode, without NUL"
        )
    return text


def search_words(text: str) -> str:
    """Return an FTS5 expression for every word of the text, as the start of a word.

    Words between quotes are a phrase.
    """
    pairs = re.findall(r'"([^"]+)"|([^\s"]+)', usable_text("q", text))
    words = [phrase or word for phrase, word in pairs]
    # FTS5 takes _ as a separator
    usable = [word for word in words if re.search(r"[^\W_]", word)]
    if not usable:
        raise QueryError(f"q = {text}: must have a letter or a digit: text is found by words")
    if len(usable) > MAX_PARTS:
        raise QueryError(f"q: {len(usable)} words: must be at most {MAX_PARTS} words")
    return " AND ".join('"' + word.replace('"', '""') + '" *' for word in usable)
