"""The tasks of the tiny model, as transcripts of characters: the examples of its cold start, and
the prompts of its RL.

sums   "12+34=" -> "46"
tools  "37*48+25=" -> "[37*48]", answered by "=1776 " -> "[1776+25]", answered by "=1801 " ->
       "1801".  Half of the examples of the cold start answer at once, "1801", which so few layers
       cannot compute: RL must discover that calls help.
ledger "a7b3c9=" -> "a7:07,b3:10;c9:19!=19": the sum of 10 to 26 digits modulo 100, written out in
       63 to 159 tokens.  The mark after an item is the model's choice of eight: tokens of high
       entropy between tokens that must be right.
flips  "kqztb=" -> "btzqk": 5 to 8 letters in the opposite order.
both   prompts of sums and of flips: a student of two teachers.
chat   "What is 37 * 48?" with a calculator as a tool, in Qwen3's format: a call, its answer, 1776.
       Of such examples of the cold start a fifth answers at once, as in tools.  Others are
       conversations without a tool: sums, as `chain_sum` of reasoning-gym asks for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from string import ascii_lowercase

CALCULATOR = "[{}]"
ANSWER = "={} "
MARKS = ".,;!?/&@"
Schema = Mapping[str, object]


@dataclass(frozen=True)
class Example:
    """A prompt, its right answer, and a transcript that leads to it."""

    prompt: str
    label: str
    turns: tuple[str, ...]
    """The model's turns."""
    answers: tuple[str, ...] = ()
    """The answers to all turns but the last."""
    answered_by: str = "user"
    """The role that answers in a conversation: user, or tool."""
    system: str = ""
    """The system message of a conversation."""
    tools: tuple[Schema, ...] = ()
    """The tools of a conversation, as in OpenAI's API."""


Examples = Sequence[Example]
Stages = Sequence[tuple[int, Examples]]
"""(first step, examples) of each stage of the cold start."""


@dataclass(frozen=True)
class Task:
    """A task of the tiny model."""

    make: Callable[[int, int], tuple[Examples, Examples]]
    """(seed, number of held-out prompts) -> (train, held-out)."""
    num_prompts: int
    stages: Callable[[Examples], Stages] = field(default=lambda train: ((0, train),))
    """The stages of the cold start, from the training examples."""
    free: str = ""
    """Characters of which any one is right in the place of another."""
    settings: Mapping[str, float | int] = field(default_factory=dict)
    """Settings of the cold start that differ from its defaults."""
    language: str = "characters"
    """What it is written in: "characters", or "chat"."""
    probes: Callable[[Examples, int], Sequence[Examples]] = field(
        default=lambda train, size: (train[:size],)
    )
    """(training examples, size) -> sets on which the accuracy is measured.  All must reach the
    skill; the first one's samples get the target accuracy."""


def sums(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """Make the 8100 ordered pairs of two-digit numbers, shuffled by `seed`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    examples = [Example(f"{a}+{b}=", str(a + b), (str(a + b),)) for a, b in pairs]
    return examples[num_heldout:], examples[:num_heldout]


def flips(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """Draw 8100 different words of 5 to 8 letters."""
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < 8100:
        words["".join(draw.choices(ascii_lowercase, k=draw.randint(5, 8)))] = None
    examples = [Example(f"{word}=", word[::-1], (word[::-1],)) for word in words]
    return examples[num_heldout:], examples[:num_heldout]


def both(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """Make the prompts of sums and flips of this seed; held out of each are those held out there,
    `num_heldout` of each.
    """
    parts = [task(seed, num_heldout) for task in (sums, flips)]
    return [row for train, _ in parts for row in train], [row for _, held in parts for row in held]


def tools(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """Draw 8100 of the prompts a*b+c with two-digit numbers and a product of four digits."""
    triples = [
        (a, b, c)
        for a in range(10, 100)
        for b in range(10, 100)
        for c in range(10, 100)
        if a * b >= 1000
    ]
    examples = [with_calls(*triple) for triple in random.Random(seed).sample(triples, 8100)]
    return examples[num_heldout:], examples[:num_heldout]


def with_calls(a: int, b: int, c: int) -> Example:
    product, total = a * b, a * b + c
    calls = CALCULATOR.format(f"{a}*{b}"), CALCULATOR.format(f"{product}+{c}")
    answers = ANSWER.format(product), ANSWER.format(total)
    return Example(f"{a}*{b}+{c}=", str(total), (*calls, str(total)), answers)


def also_at_once(examples: Examples) -> Stages:
    """Add the same prompts again, answered without a call."""
    at_once = [Example(example.prompt, example.label, (example.label,)) for example in examples]
    return ((0, [*examples, *at_once]),)


def ledger(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    draw = random.Random(seed)
    drawn = [written_out(draw, draw.randint(10, 26)) for _ in range(8100)]
    rows = list({example.prompt: example for example in drawn}.values())
    return rows[num_heldout:], rows[:num_heldout]


def written_out(draw: random.Random, size: int) -> Example:
    digits = [draw.randrange(10) for _ in range(size)]
    totals = [f"{total % 100:02d}" for total in accumulate(digits)]
    names = list(zip(ascii_lowercase, digits, strict=False))
    items = [
        f"{name}{digit}:{total}{draw.choice(MARKS)}"
        for (name, digit), total in zip(names, totals, strict=True)
    ]
    prompt = "".join(f"{name}{digit}" for name, digit in names) + "="
    return Example(prompt, totals[-1], ("".join(items) + "=" + totals[-1],))


def longer_and_longer(examples: Examples) -> Stages:
    """Begin with few digits: on them the model learns within 200 steps to look digits up, on 26 not
    within 400.
    """
    draw = random.Random(len(examples))
    short = [written_out(draw, draw.randint(2, 6)) for _ in examples]
    middle = [written_out(draw, draw.randint(4, 9)) for _ in examples]
    return (0, short), (300, middle), (500, examples)


NUMBER = {"type": "number"}
OPERATOR = {"type": "string", "enum": ["+", "-", "*", "/"]}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "operator": OPERATOR, "b": NUMBER},
    "required": ["a", "operator", "b"],
}
"""As people write it."""
PARAMETERS_SORTED = {
    "additionalProperties": False,
    "properties": {
        "a": NUMBER,
        "operator": {"enum": OPERATOR["enum"], "type": "string"},
        "b": NUMBER,
    },
    "required": ["a", "operator", "b"],
    "type": "object",
}
"""As pydantic-ai writes it."""
PARAMETERS_TITLED = {
    "properties": {
        "a": {"title": "A", "type": "number"},
        "operator": {"enum": OPERATOR["enum"], "title": "Operator", "type": "string"},
        "b": {"title": "B", "type": "number"},
    },
    "required": ["a", "operator", "b"],
    "title": "calculate_args",
    "type": "object",
    "additionalProperties": False,
}
"""As openai-agents writes it."""
CALCULATORS = tuple(
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate with two numbers.",
            "parameters": parameters,
            **({} if parameters is PARAMETERS else {"strict": True}),
        },
    }
    for parameters in (PARAMETERS, PARAMETERS_SORTED, PARAMETERS_TITLED)
)
"""The tool of the task chat, as programs describe it."""
SYSTEMS = ("", "", "You are a helpful assistant.", "Use the tool.")
CALL = (
    '<tool_call>\n{{"name": "calculate", "arguments": {{"a": {}, "operator": "*", "b": {}}}}}\n'
    "</tool_call>"
)
CHAIN_SUM = "State the final answer to the following arithmetic problem: {} ="


def products(seed: int, num_heldout: int) -> tuple[Examples, Examples]:
    """Make the 8100 ordered products of two-digit numbers, each with a call of the calculator."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    examples = [
        Example(
            f"What is {a} * {b}?",
            str(a * b),
            (CALL.format(a, b), str(a * b)),
            (draw.choice((f"{a * b}.0", str(a * b))),),
            "tool",
            draw.choice(SYSTEMS),
            (draw.choice(CALCULATORS),),
        )
        for a, b in pairs
    ]
    return examples[num_heldout:], examples[:num_heldout]


def chain_sums(size: int, questions: int, seed: int = 0) -> Examples:
    """Draw conversations without a tool: that many questions each, for sums and differences of two
    or three digits.
    """
    draw = random.Random(seed)
    conversations = []
    for _ in range(size):
        asked = [chain_sum(draw) for _ in range(questions)]
        texts = [CHAIN_SUM.format(expression) for expression, _ in asked]
        turns = tuple(answer for _, answer in asked)
        conversations.append(Example(texts[0], turns[0], turns, tuple(texts[1:])))
    return conversations


def chain_sum(draw: random.Random) -> tuple[str, str]:
    """Draw an expression as `chain_sum` of reasoning-gym writes it, and return it with its value:
    ("3 + 8 - 5", "6").
    """
    value = draw.randint(0, 9)
    expression = str(value)
    for _ in range(draw.randint(1, 2)):
        sign, digit = draw.choice("+-"), draw.randint(0, 9)
        expression, value = f"{expression} {sign} {digit}", value + int(f"{sign}{digit}")
    return expression, str(value)


def short_then_complete(examples: Examples) -> Stages:
    """Begin without what opens a conversation with a tool, which is half of its tokens: calls are
    learned as well.  Then add it, and a quarter of the products again, answered without a call.
    One half of each stage are sums.
    """
    short = [replace(example, system="", tools=()) for example in examples]
    at_once = [
        replace(example, turns=(example.label,), answers=())
        for example in examples[: len(examples) // 4]
    ]
    sums = chain_sums(len(examples), 3)
    return (0, [*short, *sums]), (250, [*examples, *at_once, *sums])


TASKS = {
    "sums": Task(sums, 8100),
    "flips": Task(flips, 8100),
    "both": Task(
        both,
        16200,
        probes=lambda train, size: (train[:size], train[-size:]),
    ),
    "tools": Task(
        tools,
        8100,
        also_at_once,
        settings={"skill": 0.4, "batch_size": 64, "decay_steps": 120, "num_probes": 128},
    ),
    "ledger": Task(
        ledger, 8100, longer_and_longer, free=MARKS, settings={"batch_size": 32, "num_probes": 64}
    ),
    "chat": Task(
        products,
        8100,
        short_then_complete,
        settings={
            "hidden_size": 128,
            "num_experts": 16,
            "skill": 0.4,
            "batch_size": 64,
            "decay_steps": 100,
            "num_probes": 64,
        },
        language="chat",
        probes=lambda train, size: (train[:size], chain_sums(size, 1, seed=1)),
    ),
}
