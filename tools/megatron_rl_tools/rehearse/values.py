"""Values of small tensors on the pretended GPU.

Counts of tokens, shapes that pipeline stages send and splits of an all-to-all decide sizes.  A
tensor of at most MOST elements whose inputs are known is computed on the CPU too, so that core's
own code gets true numbers when it copies them to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from megatron_rl_tools.rehearse.recorder import Recorder

MOST = 262_144
"""Elements: token counts of 256 experts from 1,024 ranks, or the bytes of an object."""
FACTORIES = ("zeros", "ones", "full", "arange", "scalar_tensor", "zeros_like", "ones_like")
UNKNOWN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Values:
    """The known values of the pretended tensors of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values (on the CPU), or None where they are not known."""
        value: torch.Tensor | None = getattr(tensor, "known_value", None)
        if value is None:
            return None
        allocation = self.recorder.allocate(tensor)
        return value if allocation is not None and allocation.is_known else None

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give a pretended tensor its values; views of it that exist stay unknown."""
        tensor.known_value = value.detach()  # type: ignore[attr-defined]
        allocation = self.recorder.allocate(tensor)
        if allocation is not None:
            allocation.is_known = True

    def forget(self, tensor: torch.Tensor) -> None:
        """An operation wrote something unknown into the storage of this tensor."""
        allocation = self.recorder.allocate(tensor)
        if allocation is not None:
            allocation.is_known = False

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Compute the values of an operation's results, or forget what it overwrote.

        Call it after the operation on pretended tensors, with its arguments and results.
        """
        schema = func._schema  # type: ignore[attr-defined]
        name = schema.name.removeprefix("aten::")
        outputs = [leaf for leaf in leaves(out) if isinstance(leaf, FakeTensor)]
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_small = all(tensor.numel() <= MOST for tensor in (*inputs, *outputs))
        if name == "copy_" and is_small and self._overwrites(args[0]):
            source = self._cpu(args[1])
            if source is not None:
                self.set(args[0], source.to(args[0].dtype).expand(args[0].shape).clone())
                return
        if is_small and outputs and name not in UNKNOWN and (inputs or name in FACTORIES):
            known = {id(tensor): self._cpu(tensor) for tensor in inputs}
            if all(value is not None for value in known.values()) and is_repeatable(func):
                self._compute(func, args, kwargs, known, outputs)
                return
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in leaves(value):
                    if isinstance(tensor, FakeTensor):
                        self.forget(tensor)

    def _compute(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        known: dict[int, torch.Tensor | None],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        def on_cpu(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return known[id(leaf)]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with torch.no_grad():
            result = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        values = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        for output, value in zip(outputs, values, strict=True):
            self.set(output, value)

    def _cpu(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.of(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _overwrites(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is all of its storage."""
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def leaves(value: Any) -> list[Any]:
    """Return what is in nested tuples, lists and dicts; torch's tree_leaves takes ten times as
    long, for every operation.
    """
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


def is_repeatable(func: Callable[..., Any]) -> bool:
    """Return whether the operation gives the same result again: it draws no random numbers."""
    tags = func.tags  # type: ignore[attr-defined]
    return torch.Tag.nondeterministic_seeded not in tags
