"""The order in which training takes its prompts, as the sampler sees it: one file (prompts.py), or
several that are mixed (mixture.py).

The order is the same on every rank: a rank takes all prompts of a step and uses its share.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from megatron_rl.data.pass_rates import PassRates
from megatron_rl.data.rows import DataError
from megatron_rl.records import Prompt

PromptState: TypeAlias = dict[str, Any]
"""The place of a PromptStream in its order, as JSON values."""


class PromptStream(ABC):
    """An order over `prompts` that a checkpoint can continue."""

    def __init__(self, prompts: Sequence[Prompt], rates: PassRates | None = None) -> None:
        self.prompts = prompts
        self.rates = rates
        """The last pass rates (data.sampling = pass_rate); None: prompts are not chosen by them."""
        self.returned: list[Prompt] = []
        """Prompts to be taken again before any other."""

    def take(self, n: int) -> list[Prompt]:
        """Take the next `n` prompts.

        Raises DataError where fewer are left: see `num_available`.
        """
        taken, self.returned = self.returned[:n], self.returned[n:]
        while len(taken) < n:
            prompt = self._next()
            if prompt is None:
                raise DataError(
                    f"data.train: {n} prompts were to be taken, {len(taken)} are left: a source"
                    " with when_used_up = stop or drop is used up"
                )
            taken.append(prompt)
        return taken

    def num_available(self, wanted: int) -> int:
        """Return how many of the next `wanted` prompts there are: fewer only where a source that is
        not repeated is used up.
        """
        if self.is_endless:
            return wanted
        ahead, count = self._copy(), min(wanted, len(self.returned))
        while count < wanted and ahead._next() is not None:
            count += 1
        return count

    def peek(self, n: int) -> list[int]:
        """Return the numbers of the prompts that take(n) would return."""
        return self.numbers(self._copy().take(n))

    def numbers(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the indices of taken prompts in `self.prompts`, which are the same in every run on
        the same data.
        """
        if not prompts:  # as in most steps, which need no index of perhaps a million prompts
            return []
        return [self._index[id(prompt)] for prompt in prompts]

    def note(self, prompts: Sequence[Prompt], passed: np.ndarray, scored: np.ndarray) -> None:
        """Note the results of prompts that were sampled, for data.sampling = pass_rate.

        passed, scored: int [n], responses to each prompt that passed, and that have a reward.
        Every rank must note the same.
        """
        if self.rates is not None:
            self.rates.note(self.numbers(prompts), passed, scored)

    @cached_property
    def _index(self) -> dict[int, int]:
        """Number of each prompt by its identity, as two rows of a file may be equal."""
        return {id(prompt): number for number, prompt in enumerate(self.prompts)}

    @property
    @abstractmethod
    def is_endless(self) -> bool:
        """True if there is always a next prompt."""

    @abstractmethod
    def _next(self) -> Prompt | None:
        """Return the next prompt that was not returned; None where the data is used up."""

    def _copy(self) -> PromptStream:
        """Return a copy of the place in the order; prompts and pass rates are shared."""
        # a shallow copy is enough where `_next` changes no attribute in place
        return copy.copy(self)

    @abstractmethod
    def state_dict(self, first: Sequence[Prompt] = ()) -> PromptState:
        """Return the place in the order.  first: taken prompts, to be taken again before others."""

    @abstractmethod
    def load_state_dict(self, state: PromptState) -> None:
        """Continue from `state`.  Raises DataError where it was made with other data."""

    @abstractmethod
    def place(self) -> str:
        """Return the place in the order in words."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the data: see docs/reference/metrics.md."""
        return {} if self.rates is None else self.rates.metrics()
