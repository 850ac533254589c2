"""Rows in the schemas of the recipes' data, written by hand, and files of them."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
SUMS = [("A box holds 6 eggs. How many are in 7 boxes?", "42"), ("What is half of 18?", "9"),
        ("Ann has 3 coins, and finds 5. How many has she?", "8"),
        ("Two shirts cost $1,250 each. What do both cost?", "2,500"),
        ("Nine birds sit on a wire, two leave. How many stay?", "7")]  # fmt: skip
HELD = [("What is 11 times 11?", "121"), ("A day has 24 hours. How many has a week?", "168")]


def gsm8k(pairs):
    return [
        {"question": question, "answer": f"So it is <<{answer}>>.\n#### {answer}"}
        for question, answer in pairs
    ]


def verl(pairs, before="", after=""):
    return [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{before}{question}{after}"}],
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": str(number)},
        }
        for number, (question, answer) in enumerate(pairs)
    ]


def dapo(pairs):
    """Every row three times, as in the released file each is about a hundred times."""
    return verl(pairs, BEFORE, AFTER) * 3


def problems(pairs):
    return [{"problem": question, "answer": answer} for question, answer in pairs]


def squad(pairs):
    return [
        {
            "id": str(number),
            "title": "Sums",
            "context": f"It is known that the answer to {question!r} is {answer}.",
            "question": question,
            "answers": {"text": [answer, answer], "answer_start": [0, 0]},
        }
        for number, (question, answer) in enumerate(pairs)
    ]


def write(path: Path, rows) -> Path:
    """Write a jsonl file, or a parquet file by the suffix of its path."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


DATA = {
    "agent": {"train": gsm8k(SUMS), "test": gsm8k(HELD)},
    "gsm8k": {"train": gsm8k(SUMS), "test": gsm8k(HELD)},
    "math": {
        "train": dapo(SUMS), "aime24": problems(HELD), "aime25": problems(HELD[1:]),
        "math500": problems(HELD[:1]), "hmmt25": problems([("What is 1/2 + 1/4?", r"\frac34")]),
    },
    "distil": {
        "train": dapo(SUMS), "aime25": problems(HELD[1:]), "math500": problems(HELD[:1]),
    },
    "search": {"train": squad(SUMS), "test": squad(HELD)},
}  # fmt: skip
"""Recipe -> set -> rows in the schema of its repository."""
