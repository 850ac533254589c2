"""Writes laptop_data/: a library of books with numbers, for the tiny model that chats.

    python laptop.py      # needs no network

train.jsonl, test.jsonl and corpus.jsonl are written by prepare.py.  sft.jsonl has conversations
about other books, from which the model learns the tool by SFT, until it copies numbers in part.
"""

import json
import random
from functools import partial
from pathlib import Path

from agent import TASK, search
from prepare import COLUMNS, convert, prepare, solution

from megatron_rl.recipes.prepare import Row, Source
from megatron_rl.rollout.agents.tools import described

OUT = "laptop_data"
SIZES = {"train": 256, "test": 64, "sft": 576}
"""Books of each set; a book is in one set."""


def books(name: str) -> list[Row]:
    """Return the rows of a set, in SQuAD's schema."""
    draw = random.Random(0)
    numbers = draw.sample(range(100, 1000), sum(SIZES.values()))
    shelves = [draw.randint(10, 99) for _ in numbers]
    first = sum(SIZES[other] for other in list(SIZES)[: list(SIZES).index(name)])
    pairs = list(zip(numbers, shelves, strict=True))[first : first + SIZES[name]]
    return [
        {
            "title": "Library",
            "context": f"Book {number} is on shelf {shelf}.",
            "question": f"On which shelf is book {number}?",
            "answers": {"text": [str(shelf)]},
        }
        for number, shelf in pairs
    ]


def conversations() -> list[Row]:
    """Return rows of SFT: a search, the passage that it finds, the answer."""
    rows = []
    for row in books("sft"):
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
    sources = {
        name: Source("library", "", COLUMNS, convert, generate=partial(books, name))
        for name in ("train", "test")
    }
    status = prepare(sources, ["--config", "laptop.toml", "--out", OUT, "--model", "tiny"])
    if status == 0:
        rows = conversations()
        path = Path(OUT) / "sft.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"wrote {path}: {len(rows)} conversations")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
