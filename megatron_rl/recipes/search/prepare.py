"""Writes data/train.jsonl, data/test.jsonl with rows {"id", "prompt", "label"}, data/corpus.jsonl.

    python prepare.py                                # downloads; needs: pip install datasets
    python prepare.py --from train=FILE test=FILE    # local files, jsonl or parquet

The corpus is every passage that a question of either file was asked about.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.recipes.prepare import Row, Source, main

PASSAGES: dict[str, str] = {}
"""Text -> title, in the order of the files."""


def convert(row: Row) -> Row:
    """A label has one right answer a line."""
    answers = dict.fromkeys(row["answers"]["text"])
    if not answers:
        raise ValueError("'answers' has no text; leave out questions without an answer")
    PASSAGES.setdefault(row["context"], row["title"])
    return {"prompt": row["question"].strip(), "label": "\n".join(answers)}


def solution(row: Row) -> str:
    """A response that reward.py must accept: the first rows are checked with it."""
    return f"<answer>{row['label'].splitlines()[0]}</answer>"


COLUMNS = {"title": str, "context": str, "question": str, "answers": dict}
FOLDER = "plain_text"
SOURCES = {  # name of the set -> where it is on the Hugging Face hub
    name: Source("rajpurkar/squad", f"{FOLDER}/{file}-00000-of-00001.parquet", COLUMNS, convert, n)
    for name, file, n in (("train", "train", 87_599), ("test", "validation", 10_570))
}


def prepare(sources: dict[str, Source], argv: list[str]) -> int:
    """Write the sets and the corpus, and return the exit status."""
    status = main(sources, solution, argv)
    if status == 0:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--out", type=Path, default=Path("data"))
        corpus = parser.parse_known_args(argv)[0].out / "corpus.jsonl"
        rows = ({"title": title, "text": text} for text, title in PASSAGES.items())
        corpus.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"wrote {corpus}: {len(PASSAGES):,} passages")
    return status


if __name__ == "__main__":
    raise SystemExit(prepare(SOURCES, sys.argv[1:]))
