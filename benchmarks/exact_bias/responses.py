"""Every response of a policy with a vocabulary of 8 ids and at most three tokens.

A response ends with END or after three tokens: the 512 strings of three ids are 400 different
responses to a prompt.

Shapes: n prefixes of all prompts, m responses of all prompts, T tokens of all responses.
A token is one of n * 8 `steps`: (prefix, next id).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss import Sequences

VOCAB, LONGEST, END = 8, 3, 0
PROMPTS = ((3, 5), (6, 1))
GOING_ON = tuple(token for token in range(VOCAB) if token != END)

Prefix = tuple[int, tuple[int, ...]]
"""(index of the prompt, ids of the response so far), without END."""


def all_prefixes() -> list[Prefix]:
    return [
        (prompt, ids)
        for prompt in range(len(PROMPTS))
        for length in range(LONGEST)
        for ids in itertools.product(GOING_ON, repeat=length)
    ]


def all_responses() -> list[Prefix]:
    """Return (index of the prompt, ids) of every response, END included."""
    return [
        (prompt, (*ids, last))
        for prompt, ids in all_prefixes()
        for last in range(VOCAB)
        if last == END or len(ids) == LONGEST - 1
    ]


@dataclass(frozen=True)
class Responses:
    """The tokens of all responses in one row, as the losses take them."""

    prompts: Tensor
    """int64 [m], index of the prompt."""
    ids: list[tuple[int, ...]]
    """The ids of every response."""
    steps: Tensor
    """int64 [T], the step of every token."""
    sequences: Sequences
    """The response of every token."""

    @classmethod
    def make(cls) -> Responses:
        number = {prefix: index for index, prefix in enumerate(all_prefixes())}
        responses = all_responses()
        steps = [
            number[prompt, ids[:position]] * VOCAB + token
            for prompt, ids in responses
            for position, token in enumerate(ids)
        ]
        owners = [index for index, (_, ids) in enumerate(responses) for _ in ids]
        return cls(
            torch.tensor([prompt for prompt, _ in responses]),
            [ids for _, ids in responses],
            torch.tensor(steps),
            Sequences.of(torch.tensor(owners), torch.ones(len(steps), dtype=torch.bool)),
        )

    @property
    def lengths(self) -> Tensor:
        """int64 [m], tokens of every response."""
        return torch.tensor([len(ids) for ids in self.ids])

    def log_probabilities(self, step_logprobs: Tensor) -> Tensor:
        """Return log pi(y) [m] from the log-probs of all steps [n, 8]."""
        tokens = step_logprobs.flatten()[self.steps]
        sums = torch.zeros(len(self.ids), dtype=tokens.dtype)
        return sums.index_add(0, self.sequences.ids, tokens)

    def per_token(self, values: Tensor) -> Tensor:
        """Return the values [m] of the responses at each of their tokens [T]."""
        return values[self.sequences.ids]

    def mean(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return, at every response [m], the mean of `values` [m] over the responses to its prompt,
        weighted by `weights` [m].
        """
        return self.total(weights * values) / self.total(weights)

    def total(self, values: Tensor) -> Tensor:
        """Return, at every response [m], the sum of `values` [m] over the responses to its
        prompt.
        """
        zeros = torch.zeros(len(PROMPTS), dtype=values.dtype)
        return zeros.index_add(0, self.prompts, values)[self.prompts]
