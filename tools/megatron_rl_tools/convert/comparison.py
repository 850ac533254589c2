"""Compares the tensors of two checkpoints of either kind, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.files import dtype_name
from megatron_rl_tools.convert.conversion_files import FileWork, gather_digests
from megatron_rl_tools.convert.conversion_sides import Named, Side


@dataclass
class Comparison:
    """The tensors that were compared, by the result; the order of the checkpoints has no part."""

    count: int = 0
    different: list[str] = field(default_factory=list)
    rounded: dict[str, list[str]] = field(default_factory=dict)
    """Names of tensors that are equal after rounding, by the dtypes of both."""

    def lines(self) -> Iterator[str]:
        """Yield the result, worst first."""
        if self.different:
            number = f"{len(self.different)} of {self.count} tensors differ"
            yield f"{number}, first {', '.join(self.different[:5])}"
        for how, names in self.rounded.items():
            number = f"{len(names)} of {self.count} tensors are equal after rounding to {how}"
            yield f"{number}, first {', '.join(names[:5])}"
        if not self.different and not self.rounded:
            yield f"{self.count} tensors are the same"


def verify(one: Side, other: Side, spec: ModelSpec, work: FileWork) -> Comparison:
    """Compare all tensors of two checkpoints.  Collective."""
    part = Comparison()
    for number, entry in enumerate(entries(spec)):
        if number % work.world != work.rank:
            continue
        for index, name in enumerate(entry.hf_names):
            part.count += 1
            result = compare(one.tensor(entry, index), other.tensor(entry, index))
            if result is None:
                part.different.append(name)
            elif result:
                part.rounded.setdefault(result, []).append(name)
    whole = Comparison()
    for of_rank in gather_digests(part):
        whole.count += of_rank.count
        whole.different = sorted(whole.different + of_rank.different)
        for how, names in of_rank.rounded.items():
            whole.rounded[how] = sorted(whole.rounded.get(how, []) + names)
    return whole


def compare(one: Iterable[Named], other: Iterable[Named]) -> str | None:
    """Return "" for blocks of equal values, how they are equal after rounding, or None.

    Values of different dtypes are compared in the dtype that holds both, and then in either.
    """
    equal_in: set[torch.dtype] | None = None
    wide, stored = None, set[torch.dtype]()
    for (_, a), (_, b) in zip(one, other, strict=True):
        wide, stored = torch.promote_types(a.dtype, b.dtype), {a.dtype, b.dtype}
        equal = {dtype for dtype in {wide, *stored} if torch.equal(a.to(dtype), b.to(dtype))}
        equal_in = equal if equal_in is None else equal_in & equal
        if not equal_in:
            return None
    if equal_in is None or wide in equal_in:
        return ""
    names = " and ".join(sorted(map(dtype_name, stored)))
    return f"{min(map(dtype_name, equal_in))} (stored as {names})"
