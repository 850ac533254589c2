"""Writes laptop_data/: functions of one line, for the tiny model that chats.

    python laptop.py      # needs no network

train.jsonl and test.jsonl are written by prepare.py.  sft.jsonl has answers to the problems of
train.jsonl, from which the model learns the form by SFT.  Half of them leave out the second
operation: RL must discover that the tests want both.
"""

import json
import operator
import random
from functools import partial
from itertools import product
from pathlib import Path

from prepare import COLUMNS, convert, solution

from megatron_rl.recipes.prepare import Row, Source, main

OUT = Path("laptop_data")
NUM_TEST = 64
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIGITS = range(2, 10)
ARGUMENTS = (2, 5, 11)
"""Arguments of the calls in the tests."""


def problems() -> list[Row]:
    """Return every problem, in MBPP's schema and in a fixed order; "half" is a wrong answer."""
    forms = list(product(SIGNS, DIGITS, SIGNS, DIGITS))
    random.Random(0).shuffle(forms)
    rows = []
    for first, a, second, b in forms:
        values = [SIGNS[second](SIGNS[first](number, a), b) for number in ARGUMENTS]
        pairs = zip(ARGUMENTS, values, strict=True)
        rows.append(
            {
                "text": f"Write f: x {first} {a}, then {second} {b}.",
                "code": f"def f(x):\n    return (x {first} {a}) {second} {b}",
                "half": f"def f(x):\n    return x {first} {a}",
                "test_list": [f"assert f({number}) == {value}" for number, value in pairs],
            }
        )
    return rows


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
