"""The tasks of the tiny model, as transcripts of characters: what it is shown in its cold start, and the prompts of its RL.

sums   "12+34=" -> "46"
tools  "37*48+25=" -> "[37*48]", answered by "=1776 " -> "[1776+25]", answered by "=1801 " -> "1801".  Half of what the cold
       start shows answers at once, "1801", which so few layers cannot compute: RL has to find out that calls help.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

CALCULATOR = "[{}]"
ANSWER = "={} "


@dataclass(frozen=True)
class Example:
    """A prompt, its right answer, and a transcript that leads there: the model's turns, and what follows each but the last."""

    prompt: str
    label: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()


Examples = Sequence[Example]


@dataclass(frozen=True)
class Task:
    """make(seed, number of held-out prompts) -> (train, held-out); settings: of the cold start, in place of its defaults.

    more: what the cold start is shown beside `train`.
    """

    make: Callable[[int, int], tuple[Examples, Examples]]
    num_prompts: int
    more: Callable[[Examples], Examples] = field(default=lambda train: ())
    settings: Mapping[str, float | int] = field(default_factory=dict)


def sums(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """The 8100 ordered pairs of two-digit numbers, shuffled by `seed`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    examples = [Example(f"{a}+{b}=", str(a + b), (str(a + b),)) for a, b in pairs]
    return examples[num_heldout:], examples[:num_heldout]


def tools(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """8100 of the prompts a*b+c with two-digit numbers and a product of four digits."""
    triples = [(a, b, c) for a in range(10, 100) for b in range(10, 100) for c in range(10, 100) if a * b >= 1000]
    examples = [with_calls(*triple) for triple in random.Random(seed).sample(triples, 8100)]
    return examples[num_heldout:], examples[:num_heldout]


def with_calls(a: int, b: int, c: int) -> Example:
    product, total = a * b, a * b + c
    calls = CALCULATOR.format(f"{a}*{b}"), CALCULATOR.format(f"{product}+{c}")
    return Example(f"{a}*{b}+{c}=", str(total), (*calls, str(total)), (ANSWER.format(product), ANSWER.format(total)))


def at_once(examples: Examples) -> Examples:
    """The same prompts, answered without a call."""
    return [Example(example.prompt, example.label, (example.label,)) for example in examples]


TASKS = {
    "sums": Task(sums, 8100),
    "tools": Task(
        tools, 8100, more=at_once, settings={"skill": 0.4, "batch_size": 64, "decay_steps": 120, "num_probes": 128}
    ),
}
