"""One rollout: its text token by token, with everything that both engines recorded of each.

Shapes: S tokens, R of them sampled, L MoE layers, K top-k.  A list of values has S entries, null
off the tokens it is of. Row j of routes is the forward that read token j: it predicted token j + 1,
at which the number of its flips stands.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import numpy as np

from megatron_rl_viewer.answer import packed
from megatron_rl_viewer.index import rollout_key
from megatron_rl_viewer.pieces import shown_tokens
from megatron_rl_viewer.query import find_rollout
from megatron_rl_viewer.run_folder import Run
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, tensor_file_name

CLIPPED_HIGH, CLIPPED_LOW, WEIGHT_MASK, REJECTED, NOT_FINITE, MISSING_ROUTE, LEFT_OUT = (
    1,
    2,
    8,
    16,
    32,
    64,
    128,
)
MASKED = WEIGHT_MASK | REJECTED | NOT_FINITE | MISSING_ROUTE | LEFT_OUT
PER_TOKEN = {
    "log_pi_old": "old_logprobs", "ratio": "ratio", "weight": "weight", "entropy": "entropy",
    "loss": "loss", "rank": "rank",
    "flags": "flags",
}  # fmt: skip
"""Name in the answer -> kind of the trainer's half, [R] each."""
SIBLING = ("reward", "advantage", "length", "finish_reason", "kl", "flip_frac", "episode")
Array = np.ndarray


def rollout(run: Run, key: str) -> dict | None:
    """The answer to /rollout/KEY; None where the run has no such rollout.

    "missing" names what cannot be read, "notes" what the run did not save or the viewer has not
    read yet.
    """
    with closing(run.index.connect()) as connection:
        row = find_rollout(connection, key)
        if row is None:
            return None
        step, file, name = row["step"], row["file"], row["id"]
        group = connection.execute(
            "SELECT * FROM rollouts WHERE group_key = ? ORDER BY number", (row["group_key"],)
        )
        siblings = [
            {"key": rollout_key(each["step"], each["file"], each["id"])}
            | {column: each[column] for column in SIBLING}
            for each in group
        ]
        trained = connection.execute(
            "SELECT line FROM trained WHERE step = ? AND id = ? AND file IN (?, '')",
            (step, name, file),
        ).fetchone()
    missing: list[str] = []
    meta = read_line(run, file, row["offset"], row["size"], name, missing)
    of_trainer = json.loads(trained["line"]) if trained else {}
    notes: list[str] = []
    data = Tensors(run, step, file, name, of_trainer, missing, notes)
    answer = {
        "key": rollout_key(step, file, name),
        "group_key": row["group_key"],
        "meta": meta | {"trained": of_trainer or None},
        "group": siblings,
        "tokens": [],
        "values": {},
        "routes": None,
        "missing": missing,
        "notes": notes,
    }
    if data.tokens is None:
        return answer
    spans = text_spans(
        len(data.tokens),
        meta.get("prompt_length", 0),
        data.fitting(data.server("environment"), "environment", (None, 2)),
    )
    sampled = np.flatnonzero(spans == "model")
    data.check_trainer(len(sampled))
    routes = TokenRoutes(data, len(data.tokens) - 1)
    values = token_values(data, sampled, meta, routes)
    tokens = shown_tokens(data.tokens.tolist(), run.pieces(missing))
    for place, (token, span) in enumerate(zip(tokens, spans.tolist(), strict=True)):
        token |= {"span": span, "place": place}
    return answer | {"tokens": tokens, "values": values, "routes": routes.answer()}


def read_line(run: Run, file: str, offset: int, size: int, name: str, missing: list[str]) -> dict:
    """The fields of a line, read again: the index holds only what tables show."""
    try:
        with open(run.folder / f"{file}.jsonl", "rb") as stream:
            stream.seek(offset)
            fields = json.loads(stream.read(size))
        if fields["id"] == name:
            return fields
    except (OSError, ValueError, KeyError, TypeError):
        pass  # said below, as for another line that stands there now
    missing.append(
        f"{file}.jsonl: the line of {name} is not where it was: the file was written again; reload"
    )
    return {}


class Tensors:
    """Both halves of one rollout; what is wrong with them is appended to `missing`, once, and to
    `notes` what is no damage.
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
        if (
            (reason := run.not_saved())
            and shard is None
            and not has_tensors(run, tensor_file_name(file, step), name)
        ):
            notes.append(reason)
            self._trainer, self.tokens = None, None
            return
        self._server = self._open(run, tensor_file_name(file, step))
        self._trainer = self._open(run, shard) if isinstance(shard, str) else None
        # of its tensors: ids of two replicas' rollouts may be equal
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
                    "trained.jsonl: no line of this rollout: not trained on yet, or"
                    " rollout.save_tensors is false"
                )
        elif self._trainer is None and shard is None:
            missing.append(
                f"trained.jsonl: {name} has no tensors (rollout.save_tensors saves a share of the"
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
        """A half of an abandoned attempt of the step, which sampled another response, is not shown."""
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
        """The array, None (and said) if it is not of this shape; None in `shape`: any."""
        if array is None:
            return None
        if len(array.shape) == len(shape) and all(
            b is None or a == b for a, b in zip(array.shape, shape, strict=True)
        ):
            return array
        self.missing.append(
            f"{self.name}: {what} of shape {list(array.shape)}, must be {list(shape)}: not shown"
        )
        return None


def has_tensors(run: Run, shard: str, name: str) -> bool:
    """Return True where a rollout has tensors in this file, or may have had: it exists and cannot
    be read.
    """
    try:
        return name in TensorFile(run.folder, shard).ids
    except ShardError:
        return (run.folder / shard).exists()


def text_spans(length: int, prompt_length: int, environment: Array | None) -> Array:
    """[S] of "prompt", "model", "environment"."""
    spans = np.full(length, "model", dtype="<U11")
    spans[:prompt_length] = "prompt"
    for start, end in [] if environment is None else environment.tolist():
        spans[start:end] = "environment"
    return spans


def token_values(data: Tensors, sampled: Array, meta: dict, routes: TokenRoutes) -> dict[str, list]:
    """Name -> S values."""
    length = len(data.tokens) if data.tokens is not None else 0
    found: dict[str, Array | None] = {
        "log_mu": data.fitting(data.server("logprobs"), "logprobs", sampled.shape)
    }
    found |= {
        name: data.fitting(data.trainer(kind), kind, sampled.shape)
        for name, kind in PER_TOKEN.items()
    }
    updates = data.fitting(
        data.trainer("logprobs"), "logprobs of the trainer", (None, *sampled.shape)
    )
    found["log_pi"] = updates[-1] if updates is not None and len(updates) else None
    mu, old = found["log_mu"], found["log_pi_old"]
    found["log_ratio"] = None if mu is None or old is None else old - mu
    advantage = data.trainer("advantage")
    value = (
        float(advantage.ravel()[0])
        if advantage is not None and advantage.size
        else meta.get("advantage")
    )
    found["advantage"] = None if value is None else np.full(sampled.shape, value, np.float64)
    found["version"] = version_spans(meta, len(sampled))
    found["clipped"] = None if found["flags"] is None else clipped(found["flags"])
    values = {
        name: spread(array, sampled, length) for name, array in found.items() if array is not None
    }
    if routes.flips is not None:
        values["flips"] = spread(routes.flips.sum(1), np.arange(1, length), length)
    return values


def spread(array: Array, places: Array, length: int) -> list:
    """S entries: the values at their places, None elsewhere."""
    values: list[Any] = [None] * length
    for place, value in zip(places.tolist(), array.tolist(), strict=True):
        values[place] = value
    return values


def clipped(flags: Array) -> Array:
    """0 in the loss, 1 clipped high, 2 clipped low, 3 out of the loss for another reason."""
    conditions = [(flags & bit) > 0 for bit in (CLIPPED_HIGH, CLIPPED_LOW, MASKED)]
    return np.select(conditions, [1, 2, 3], 0)


def version_spans(meta: dict, sampled: int) -> Array | None:
    """[R], from [[version, tokens], ...] of the line; None where these are not its tokens.  A line
    of an older version names one policy_version for the entire response."""
    spans = meta.get("policy_versions") or [[meta.get("policy_version"), sampled]]
    counts = [count for _, count in spans]
    if any(version is None for version, _ in spans) or min(counts) < 0 or sum(counts) != sampled:
        return None
    return np.repeat([version for version, _ in spans], counts)


class TokenRoutes:
    """Experts of both engines, [S - 1, L, K], and where they differ, bool [S - 1, L]."""

    def __init__(self, data: Tensors, rows: int) -> None:
        self.server = data.fitting(
            data.server("routed_experts"), "routed_experts", (rows, None, None)
        )
        self.trainer = data.fitting(data.trainer("own_experts"), "own_experts", (rows, None, None))
        if (
            self.server is not None
            and self.trainer is not None
            and self.server.shape != self.trainer.shape
        ):
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
            self.flips = np.unpackbits(self.bits, axis=1, count=layers, bitorder="little").astype(
                bool
            )

    def answer(self) -> dict[str, object] | None:
        """The packed arrays; None where there is nothing of them."""
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
