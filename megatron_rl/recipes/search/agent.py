"""The model answers a question and may search in data/corpus.jsonl first, as often as it likes; the
environment variable CORPUS names another file of this folder.

BM25 by bm25s (pip install bm25s), in the trainer's process: a search takes milliseconds.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Episode, Session

CORPUS = Path(__file__).parent / os.environ.get("CORPUS", "data/corpus.jsonl")
MAX_TURNS = 5
SHOWN, LONGEST = 3, 600
"""Passages of an answer, and characters of one."""
TASK = (
    "Answer the question. You may call search as often as you need it. Give the final answer, a few"
    " words, as <answer>...</answer>."
)


@lru_cache(maxsize=1)
def index() -> tuple[Any, list[str]]:
    """Return the index of the corpus and its passages, {"title", "text"} a line."""
    try:
        import bm25s
    except ImportError as error:
        raise RuntimeError(
            f"agent.py needs the package bm25s ({error}): pip install bm25s"
        ) from None
    if not CORPUS.is_file():
        raise RuntimeError(f"{CORPUS} is missing: run python prepare.py")
    rows = [json.loads(line) for line in CORPUS.read_bytes().splitlines()]
    passages = [f"{row['title']}: {row['text']}" for row in rows]
    retriever = bm25s.BM25()
    retriever.index(tokens(passages), show_progress=False)
    return retriever, passages


def tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def search(query: str) -> str:
    """Search for passages of an encyclopedia.

    Args:
        query: the words to look for
    """
    retriever, passages = index()
    places, scores = retriever.retrieve(
        tokens([query]), k=min(SHOWN, len(passages)), show_progress=False
    )
    found = [
        passages[place][:LONGEST]
        for place, score in zip(places[0], scores[0], strict=True)
        if score > 0
    ]
    return "\n\n".join(found) or "nothing found; use other words"


async def rollout(session: Session, prompt: Prompt) -> Episode:
    question = {"role": "user", "content": prompt.text}
    messages: list[Any] = [{"role": "system", "content": TASK}, question]
    searches = 0
    for number in range(MAX_TURNS):
        tools = [search] if number < MAX_TURNS - 1 else []  # the last turn must answer
        turn = await session.generate(messages, tools=tools)
        answers = await session.call_tools(turn)
        if not answers:
            break
        searches += len(answers)
        messages += [turn.message, *answers]
    return session.finish(metrics={"searches": searches})  # reward.py scores
