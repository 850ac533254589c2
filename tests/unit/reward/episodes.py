"""Reward functions of episodes and groups, for test_episodes.py."""

import asyncio
import contextlib
import os
import time
from dataclasses import asdict

from megatron_rl.reward import Episode, Score

running = most = 0


def turns(episode: Episode):
    """The number of its turns, and what it sees as metrics."""
    assert asdict(episode)["label"] == episode.label
    return Score(
        len(episode.turns),
        {"metadata": episode.metadata.get("weight", 0), "tokens": episode.num_tokens},
    )


def by_response(episode: Episode):
    return {
        "nan metric": {"reward": 1, "metrics": {"a": float("nan")}},
        "bad name": {"reward": 1, "metrics": {"a b": 1.0}},
        "total": Score(1.0, {"errors_total": 1.0}),
        "many": Score(1.0, {f"m{i}": 1.0 for i in range(100)}),
        "keys": {"reward": 1, "metric": {}},
        "text": {"reward": "one"},
        "huge": 1e39,  # infinite in float32
        "ok": {"reward": 0.5, "metrics": {"a": 2}},
    }[episode.response]


async def wait(episode: Episode) -> float:
    """A quarter of a second, with the most calls that ran at a time; or what the response names."""
    global running, most
    running, most = running + 1, max(most, running + 1)
    match episode.response:
        case "hang":
            await asyncio.sleep(60)
        case "hang on":  # cannot be cancelled
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        case "block":
            await asyncio.sleep(0.1)
            time.sleep(60)
        case "die":
            await asyncio.sleep(0.1)
            os._exit(7)
        case "cancel":
            raise asyncio.CancelledError
        case "raise":
            raise RuntimeError("on purpose")
    await asyncio.sleep(0.25)
    running -= 1
    return Score(1.0, {"most": most})


async def side_by_side(episode: Episode) -> float:
    """Waits for seven others; then a quarter of a second, in which an eighth would be seen."""
    global running, most
    running, most = running + 1, max(most, running + 1)
    while most < 8:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.25)
    running -= 1
    return Score(1.0, {"most": most})


async def texts(prompt, response, label):
    await asyncio.sleep(0)
    return float(response == label)


def group(group: list[Episode]) -> list:
    if group[0].response == "short":
        return [0.0]
    if group[0].response == "raise":
        raise RuntimeError("on purpose")
    return [Score(len(group), {"place": place}) for place, _ in enumerate(group[:-1])] + [
        float("nan")
    ]


def bare(episode):
    return 0.0


def two(prompt, response):
    return 0.0


def unknown(episode: "Nothing"):  # noqa: F821
    return 0.0


def other(episode: dict):
    return 0.0
