"""Writes laptop_data/: a library of books with numbers, for the tiny model that chats.

    python laptop.py      # needs no network

train.jsonl, test.jsonl and corpus.jsonl are written by prepare.py.  sft.jsonl has conversations
about books on other shelves, from which the model learns the tool by SFT, until it copies numbers
in part.
"""

import json
import random
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

from agent import TASK, search
from prepare import COLUMNS, convert, prepare, solution

from megatron_rl.recipes.prepare import Row, Source
from megatron_rl.rollout.agents.tools import described

OUT = "laptop_data"
BOOKS = range(10, 100)
NUM_TEST = 32
NUM_CONVERSATIONS = 576


def books(draw: random.Random) -> list[Row]:
    """Draw a shelf for every book, and return the rows in SQuAD's schema, in any order.

    A shelf has a letter, so that a search for a book finds no shelf of this number.
    """
    shelves = [(book, f"B{draw.randint(10, 99)}") for book in BOOKS]
    draw.shuffle(shelves)
    return [
        {
            "title": "Library",
            "context": f"Book {book} is on shelf {shelf}.",
            "question": f"On which shelf is book {book}?",
            "answers": {"text": [shelf]},
        }
        for book, shelf in shelves
    ]


def conversations() -> list[Row]:
    """Return rows of SFT: a search, the passage that it finds, the answer."""
    rows, draw = [], random.Random(1)
    drawn = chain.from_iterable(books(draw) for _ in count())
    for row in islice(drawn, NUM_CONVERSATIONS):
        number = "".join(filter(str.isdigit, row["question"]))
        function = {"name": "search", "arguments": json.dumps({"query": number})}
        call = {"id": "call", "type": "function", "function": function}
        passage = f"{row['title']}: {row['context']}"
        messages = [
            {"role": "system", "content": TASK},
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call", "content": passage},
            {"role": "assistant", "content": solution({"label": row["answers"]["text"][0]})},
        ]
        rows.append({"messages": messages, "tools": [described(search)[0]]})
    return rows


def main() -> int:
    rows = books(random.Random(0))
    sources = {
        name: Source("library", "", COLUMNS, convert, generate=partial(list, part))
        for name, part in (("train", rows[NUM_TEST:]), ("test", rows[:NUM_TEST]))
    }
    status = prepare(sources, ["--config", "laptop.toml", "--out", OUT, "--model", "tiny"])
    if status == 0:
        path = Path(OUT) / "sft.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in conversations()))
        print(f"wrote {path}: {NUM_CONVERSATIONS} conversations")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
