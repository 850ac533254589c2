"""One rollout: its text token by token, with everything that both engines recorded of each token.

Shapes: S tokens, R of them sampled, L MoE layers, K top-k.  A list of values has S entries, null
for tokens without a value.  Row j of routes belongs to the forward that read token j and predicted
token j + 1; the number of its flips is listed at token j + 1.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from megatron_rl.config.run_paths import RunFolder, replica_of
from megatron_rl_viewer.answer import packed
from megatron_rl_viewer.episode import SequenceOfEpisode, episode_tree
from megatron_rl_viewer.index_rows import rollout_key
from megatron_rl_viewer.pieces import shown_tokens
from megatron_rl_viewer.query import find_rollout
from megatron_rl_viewer.run_folder import Run
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, tensor_file_name

# bits of the trainer's flags
CLIPPED_HIGH, CLIPPED_LOW = 1, 2
WEIGHT_MASK, REJECTED, NOT_FINITE, MISSING_ROUTE, LEFT_OUT = 8, 16, 32, 64, 128
MASKED = WEIGHT_MASK | REJECTED | NOT_FINITE | MISSING_ROUTE | LEFT_OUT
PER_TOKEN = {
    "log_pi_old": "old_logprobs",
    "ratio": "ratio",
    "weight": "weight",
    "entropy": "entropy",
    "loss": "loss",
    "rank": "rank",
    "flags": "flags",
}
"""Name in the answer -> kind of a tensor [R] of the trainer's half."""
SIBLING = ("reward", "advantage", "length", "finish_reason", "kl", "flip_frac", "episode")
Array = np.ndarray


def rollout(run: Run, key: str) -> dict | None:
    """Return the answer to /rollout/KEY; None if the run has no such rollout.

    "missing" has messages about what cannot be read, "notes" about what the run did not save or the
    viewer has not read yet.
    """
    with closing(run.index.connect()) as connection:
        row = find_rollout(connection, key)
        if row is None:
            return None
        step, file, name = row["step"], row["file"], row["id"]
        group = connection.execute(
            "SELECT * FROM rollouts WHERE group_key = ? ORDER BY number", (row["group_key"],)
        ).fetchall()
        siblings = [
            {"key": rollout_key(sibling["step"], sibling["file"], sibling["id"])}
            | {column: sibling[column] for column in SIBLING}
            for sibling in group
        ]
        trained = connection.execute(
            "SELECT line FROM trained WHERE step = ? AND id = ? AND file IN (?, '')",
            (step, name, file),
        ).fetchone()
    missing: list[str] = []
    meta = read_line(run, row, missing)
    of_trainer = json.loads(trained["line"]) if trained else {}
    notes: list[str] = []
    data = Tensors(run, step, file, name, of_trainer, missing, notes)
    answer = {
        "key": rollout_key(step, file, name),
        "prompt_key": row["prompt_key"],
        "meta": meta | {"trained": of_trainer or None},
        "group": siblings,
        "episode": episode_tree(sequences_of(run, row, group)),
        "tokens": [],
        "values": {},
        "routes": None,
        "missing": missing,
        "notes": notes,
    }
    if data.tokens is None:
        return answer
    environment = data.fitting(data.server("environment"), "environment", (None, 2))
    spans = text_spans(len(data.tokens), meta.get("prompt_length", 0), environment)
    sampled = np.flatnonzero(spans == "model")
    data.check_trainer(len(sampled))
    routes = TokenRoutes(data, len(data.tokens) - 1)
    values = token_values(data, sampled, meta, routes)
    tokens = shown_tokens(data.tokens.tolist(), run.pieces(missing))
    for place, (token, span) in enumerate(zip(tokens, spans.tolist(), strict=True)):
        token |= {"span": span, "place": place}
    return answer | {"tokens": tokens, "values": values, "routes": routes.answer()}


def sequences_of(
    run: Run, row: sqlite3.Row, group: Sequence[sqlite3.Row]
) -> list[SequenceOfEpisode]:
    """Return the sequences of the episode of `row`, which are rows of its group.

    What cannot be read of one is left out: its page says why.
    """
    unread: list[str] = []
    name, pieces = row["episode"] or row["id"], run.pieces(unread)
    sequences = []
    for other in group:
        if (other["episode"] or other["id"]) != name:
            continue
        key = rollout_key(other["step"], other["file"], other["id"])
        sequence = SequenceOfEpisode(key, read_line(run, other, unread), pieces=pieces)
        try:
            file = TensorFile(
                run.folder, tensor_file_name(run.folder, other["file"], other["step"])
            )
            tokens, spans = (file.get(other["id"], kind) for kind in ("tokens", "environment"))
        except ShardError:
            tokens, spans = None, None
        if tokens is not None and tokens.ndim == 1:
            sequence.tokens = tokens
            if spans is not None and spans.ndim == 2 and spans.shape[1] == 2:
                sequence.environment = spans.tolist()
        sequences.append(sequence)
    return sequences


def read_line(run: Run, row: sqlite3.Row, missing: list[str]) -> dict:
    """Read the fields of a line again: the index has only those that tables show."""
    folder, name = RunFolder(run.folder), row["id"]
    path = folder.lines_of("rollouts", row["step"], replica_of(row["file"]))
    try:
        with open(path, "rb") as stream:
            stream.seek(row["offset"])
            fields = json.loads(stream.read(row["size"]))
        if fields["id"] == name:
            return fields
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the message below covers this and another line at this place
    missing.append(
        f"{folder.name_of(path)}: the line of {name} is not where it was: the file was written"
        " again; reload"
    )
    return {}


class Tensors:
    """Both halves of one rollout.

    Messages about damage are appended to `missing`, other messages to `notes`.
    """

    def __init__(
        self,
        run: Run,
        step: int,
        file: str,
        name: str,
        trained: dict,
        missing: list[str],
        notes: list[str],
    ) -> None:
        self.name, self.missing = name, missing
        shard = trained.get("tensors")
        self._server: TensorFile | None = None
        server_file = tensor_file_name(run.folder, file, step)
        reason = run.not_saved()
        if reason and shard is None and not has_tensors(run, server_file, name):
            notes.append(reason)
            self._trainer, self.tokens = None, None
            return
        self._server = self._open(run, server_file)
        self._trainer = self._open(run, shard) if isinstance(shard, str) else None
        # the trainer's tensors have another key if two replicas' rollouts have equal ids
        self._key = str(trained.get("key", name))
        self.tokens = self.fitting(self.server("tokens"), "tokens", (None,))
        if self._server and self.tokens is None:
            missing.append(
                f"{self._server.name}: no tensors of {name} (rollout.save_tensors saves a share of"
                " the groups)"
            )
        if not trained:
            if indexing := run.indexing():
                notes.append(f"{indexing}: reload the page later for the trainer's values")
            else:
                missing.append(
                    "no line of the trainer about this rollout: not trained on yet, or"
                    " rollout.save_tensors is false"
                )
        elif self._trainer is None and shard is None:
            missing.append(
                f"{name} has no tensors of the trainer (rollout.save_tensors saves a share of the"
                " groups)"
            )

    def _open(self, run: Run, name: str) -> TensorFile | None:
        try:
            return TensorFile(run.folder, name)
        except ShardError as error:
            self.missing.append(str(error))
            return None

    def server(self, kind: str) -> Array | None:
        return self._get(self._server, self.name, kind)

    def trainer(self, kind: str) -> Array | None:
        return self._get(self._trainer, self._key, kind)

    def check_trainer(self, sampled: int) -> None:
        """Drop the trainer's half if it belongs to another response, of an abandoned attempt."""
        old = self.trainer("old_logprobs")
        if old is not None and self.fitting(old, "old_logprobs", (sampled,)) is None:
            self.missing.append(
                f"{self.name}: the trainer's half is of another response: none of it is shown"
            )
            self._trainer = None

    def _get(self, shard: TensorFile | None, name: str, kind: str) -> Array | None:
        try:
            return shard.get(name, kind) if shard else None
        except ShardError as error:
            self.missing.append(str(error))
            return None

    def fitting(
        self, array: Array | None, what: str, shape: tuple[int | None, ...]
    ) -> Array | None:
        """Return the array, or None with a message if it has another shape; None in `shape` allows
        any size.
        """
        if array is None:
            return None
        if len(array.shape) == len(shape):
            sizes = zip(array.shape, shape, strict=True)
            if all(wanted is None or size == wanted for size, wanted in sizes):
                return array
        self.missing.append(
            f"{self.name}: {what} of shape {list(array.shape)}, must be {list(shape)}: not shown"
        )
        return None


def has_tensors(run: Run, shard: str, name: str) -> bool:
    """Return whether a rollout has tensors in this file, or may have: it exists but cannot be
    read.
    """
    try:
        return name in TensorFile(run.folder, shard).ids
    except ShardError:
        return (run.folder / shard).exists()


def text_spans(length: int, prompt_length: int, environment: Array | None) -> Array:
    """Return [S] of "prompt", "model" and "environment"."""
    spans = np.full(length, "model", dtype="<U11")
    spans[:prompt_length] = "prompt"
    for start, end in [] if environment is None else environment.tolist():
        spans[start:end] = "environment"
    return spans


def token_values(data: Tensors, sampled: Array, meta: dict, routes: TokenRoutes) -> dict[str, list]:
    """Return name -> S values."""
    length = len(data.tokens) if data.tokens is not None else 0
    columns: dict[str, Array | None] = {
        "log_mu": data.fitting(data.server("logprobs"), "logprobs", sampled.shape)
    }
    columns |= {
        name: data.fitting(data.trainer(kind), kind, sampled.shape)
        for name, kind in PER_TOKEN.items()
    }
    logprobs = data.trainer("logprobs")  # one row per update
    updates = data.fitting(logprobs, "logprobs of the trainer", (None, *sampled.shape))
    columns["log_pi"] = updates[-1] if updates is not None and len(updates) else None
    mu, old = columns["log_mu"], columns["log_pi_old"]
    columns["log_ratio"] = None if mu is None or old is None else old - mu
    scored = data.server("teacher_logprobs")
    teacher = data.fitting(scored, "teacher_logprobs", sampled.shape)
    columns["log_teacher"] = teacher
    columns["teacher_gap"] = None if mu is None or teacher is None else teacher - mu
    advantage = data.trainer("advantage")
    value = meta.get("advantage")
    if advantage is not None and advantage.size:
        value = float(advantage.ravel()[0])
    columns["advantage"] = None if value is None else np.full(sampled.shape, value, np.float64)
    columns["version"] = version_spans(meta, len(sampled))
    columns["clipped"] = None if columns["flags"] is None else clipped(columns["flags"])
    values = {
        name: spread(array, sampled, length) for name, array in columns.items() if array is not None
    }
    if routes.flips is not None:
        values["flips"] = spread(routes.flips.sum(1), np.arange(1, length), length)
    return values


def spread(array: Array, places: Array, length: int) -> list:
    """Return S entries: the values at their places, None elsewhere."""
    values: list[Any] = [None] * length
    for place, value in zip(places.tolist(), array.tolist(), strict=True):
        values[place] = value
    return values


def clipped(flags: Array) -> Array:
    """Return 0 for tokens in the loss, 1 clipped high, 2 clipped low, 3 left out otherwise."""
    conditions = [(flags & bit) > 0 for bit in (CLIPPED_HIGH, CLIPPED_LOW, MASKED)]
    return np.select(conditions, [1, 2, 3], 0)


def version_spans(meta: dict, sampled: int) -> Array | None:
    """Return the weight version of each sampled token [R], from the line's [[version, tokens],
    ...]; None if these do not fit.

    A line of an older version has one policy_version for the entire response.
    """
    spans = meta.get("policy_versions") or [[meta.get("policy_version"), sampled]]
    counts = [count for _, count in spans]
    if any(version is None for version, _ in spans) or min(counts) < 0 or sum(counts) != sampled:
        return None
    return np.repeat([version for version, _ in spans], counts)


class TokenRoutes:
    """Experts of both engines, [S - 1, L, K], and where they differ, bool [S - 1, L]."""

    def __init__(self, data: Tensors, rows: int) -> None:
        shape = (rows, None, None)
        self.server = data.fitting(data.server("routed_experts"), "routed_experts", shape)
        self.trainer = data.fitting(data.trainer("own_experts"), "own_experts", shape)
        if self.server is not None and self.trainer is not None:
            self.trainer = data.fitting(self.trainer, "own_experts", self.server.shape)
        self.missing_rows = data.server("missing_routes")
        known = self.server if self.server is not None else self.trainer
        self.shape = (0, 0) if known is None else known.shape[1:]
        layers = self.shape[0] or None
        self.margin = data.fitting(data.trainer("margin"), "margin", (rows, layers))
        bits = data.trainer("flips")
        if bits is not None and layers:
            bits = data.fitting(bits, "flips", (rows, -(-layers // 8)))
        self.bits = bits if layers else None
        self.flips: Array | None = None
        if self.bits is not None:
            flips = np.unpackbits(self.bits, axis=1, count=layers, bitorder="little")
            self.flips = flips.astype(bool)

    def answer(self) -> dict[str, object] | None:
        """Return the packed arrays; None if there are no routes."""
        if self.server is None and self.trainer is None:
            return None
        # browsers have no 16-bit floats
        margin = None if self.margin is None else self.margin.astype(np.float32)
        gaps = [] if self.missing_rows is None else np.flatnonzero(self.missing_rows).tolist()
        return {
            "layers": self.shape[0],
            "top_k": self.shape[1],
            "server": packed(self.server),
            "trainer": packed(self.trainer),
            "flips": packed(self.bits),
            "margin": packed(margin),
            "missing": gaps,
        }
