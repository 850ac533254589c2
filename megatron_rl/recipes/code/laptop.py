"""Writes laptop_data/: functions of one line, for the tiny model that chats.

    python laptop.py      # needs no network

train.jsonl and test.jsonl are written by prepare.py.  sft.jsonl has answers to the problems of
train.jsonl, from which the model learns the form by SFT.  Half of them leave out the second
operation: RL must discover that the tests want both.
"""

import json
import random
from functools import partial
from itertools import product
from pathlib import Path

from prepare import COLUMNS, convert, solution

from megatron_rl.recipes.prepare import Row, Source, main

OUT = Path("laptop_data")
NUM_TEST = 64
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
DIGITS = range(2, 10)
ARGUMENTS = (2, 5, 11)
"""What the tests call the functions with."""


def problems() -> list[Row]:
    """Return every problem, in MBPP's schema and in a fixed order."""
    forms = list(product(SIGNS, DIGITS, SIGNS, DIGITS))
    random.Random(0).shuffle(forms)
    rows = []
    for first, a, second, b in forms:
        text = f"x {SIGNS[first]} {a}"
        whole = f"({text}) {SIGNS[second]} {b}"
        values = [eval_form(number, first, a, second, b) for number in ARGUMENTS]
        rows.append(
            {
                "text": f"Write f: x {first} {a}, then {second} {b}.",
                "code": f"def f(x):\n    return {whole}",
                "half": f"def f(x):\n    return {text}",
                "test_list": [
                    f"assert f({number}) == {value}"
                    for number, value in zip(ARGUMENTS, values, strict=True)
                ],
            }
        )
    return rows


def eval_form(number: int, first: str, a: int, second: str, b: int) -> int:
    """Return the value of the right function."""
    for name, digit in ((first, a), (second, b)):
        number = {"plus": number + digit, "minus": number - digit, "times": number * digit}[name]
    return number


def conversations() -> list[Row]:
    """Return rows of SFT for the problems of training: every other answer is a half."""
    rows = []
    for place, row in enumerate(problems()[NUM_TEST:]):
        code = row["code"] if place % 2 == 0 else row["half"]
        answer = solution({"label": code})
        messages = [
            {"role": "user", "content": convert(row)["prompt"]},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": messages})
    return rows


if __name__ == "__main__":
    sets = {"train": problems()[NUM_TEST:], "test": problems()[:NUM_TEST]}
    sources = {
        name: Source("one-line functions", "", COLUMNS, convert, generate=partial(list, rows))
        for name, rows in sets.items()
    }
    arguments = ["--config", "laptop.toml", "--out", str(OUT), "--model", "tiny"]
    status = main(sources, solution, arguments)
    if status == 0:
        rows = conversations()
        (OUT / "sft.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"wrote {OUT / 'sft.jsonl'}: {len(rows)} conversations")
    raise SystemExit(status)
