"""Descriptions of collectives, and the rules by which those of two ranks must agree."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """One collective, as one rank calls it."""

    rank: int
    """Global rank."""
    index: int
    """Place among all calls of this rank."""
    group: tuple[str, tuple[int, ...], int]
    """(backend, global ranks, how many groups with these were made before)."""
    number: int
    """Place among the calls of this rank in the group, or of this pair for send and recv."""
    operation: str
    dtypes: tuple[str, ...]
    inputs: tuple[int, ...]
    """Elements of the tensors that this rank sends, in the order of the ranks that get them."""
    outputs: tuple[int, ...]
    """Elements of the tensors that this rank receives, in the order of the ranks they come from."""
    num_bytes: int
    """Bytes that this rank sends or receives, whichever is more."""
    place: str
    reduction: str = ""
    root: int = -1
    """Rank in the group of the root, or of the other side of send and recv."""
    wants_values: bool = False
    """The rank waits for the values of the others."""
    values: tuple[np.ndarray, ...] | None = None
    """What it sends, where that is known."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What the calls that belong together have in common."""
        if self.operation in POINT_TO_POINT:
            me = self.group[1].index(self.rank)
            ends = (me, self.root) if self.operation == "send" else (self.root, me)
            return (self.group, *ends, self.number)
        return (self.group, self.number)

    def data(self) -> dict[str, Any]:
        """Return the call as plain data, without the values."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("values", "wants_values")
        }

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.inputs or self.outputs))
        words = [self.operation, self.reduction, "/".join(dict.fromkeys(self.dtypes))]
        text = " ".join(word for word in words if word)
        backend, ranks, _ = self.group
        shown = ranks if len(ranks) <= 8 else (*ranks[:3], "...", ranks[-1])
        names = " ".join(map(str, shown))
        root = f", root {self.root}" if self.root >= 0 else ""
        return (
            f"rank {self.rank}: {text} of [{sizes}]{root}, call {self.number} of the {backend}"
            f" group of ranks {names}, at {self.place}"
        )


def disagreement(first: Call, second: Call) -> str:
    """Return in what two calls that belong together differ, "" if they agree."""
    if first.operation in POINT_TO_POINT:
        sender, receiver = sorted((first, second), key=lambda call: call.operation != "send")
        if sender.inputs != receiver.outputs:
            return "sizes"
        return "dtypes" if sender.dtypes != receiver.dtypes else ""
    for name in ("operation", "dtypes", "reduction", "root"):
        if getattr(first, name) != getattr(second, name):
            return {"operation": "operations", "dtypes": "dtypes", "root": "roots"}.get(
                name, "reductions"
            )
    return "" if sizes_agree(first, second) else "sizes"


def sizes_agree(first: Call, second: Call) -> bool:
    """Return whether what one rank sends is what the other receives, in elements."""
    ranks, operation = first.group[1], first.operation
    a, b = ranks.index(first.rank), ranks.index(second.rank)
    if operation == "all_gather":  # outputs: one for each rank
        sent = first.inputs == second.outputs[a : a + 1], second.inputs == first.outputs[b : b + 1]
        return first.outputs == second.outputs and all(sent)
    if operation == "reduce_scatter":
        kept = first.outputs == second.inputs[a : a + 1], second.outputs == first.inputs[b : b + 1]
        return first.inputs == second.inputs and all(kept)
    if operation == "all_to_all":
        return first.inputs[b] == second.outputs[a] and second.inputs[a] == first.outputs[b]
    if operation in ("gather", "scatter"):  # the root has a part for each rank
        parts, part = ("outputs", "inputs") if operation == "gather" else ("inputs", "outputs")
        if first.root not in (a, b):
            return bool(getattr(first, part) == getattr(second, part))
        root, other, index = (first, second, b) if a == first.root else (second, first, a)
        return bool(getattr(root, parts)[index : index + 1] == getattr(other, part))
    return first.inputs == second.inputs and first.outputs == second.outputs
