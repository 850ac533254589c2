"""An environment that fails in a given way at a given point of its episode, in the trainer's
process or in its own.

The prompt says how: "BEHAVIOUR@POINT PATH"; it happens while no file is at PATH, which it then
makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Step, Turn

POINTS = ("reset", "first", "middle", "last")
"""Of an episode of three turns."""
TURNS = 3
MEGABYTES = 8 * 2**20


class Faulty:
    def reset(self, prompt: Prompt) -> object:
        self.steps = 0
        self.fault, _, path = prompt.text.partition(" ")
        self.path = Path(path)
        return self.answer([7])

    def step(self, turn: Turn) -> Any:
        self.steps += 1
        is_done = self.steps == TURNS
        observed = [8, 2 + sum(turn.token_ids) % 60]
        return self.answer(
            Step(
                observed,
                reward=float(sum(turn.token_ids)),
                done=is_done,
                metrics={"steps": self.steps},
            )
        )

    def answer(self, right: Any) -> Any:
        name, _, point = self.fault.partition("@")
        if not name or POINTS[self.steps] != point or self.path.exists():
            return right
        self.path.touch()
        wrong = BEHAVIOURS[name]()
        return (
            Step(wrong.observation, wrong.reward, right.done, wrong.metrics)
            if isinstance(wrong, Step) and self.steps
            else wrong
        )


def raises() -> None:
    raise KeyError("calculator")


def hangs() -> None:
    """With a child of its own, which must end as well."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)


def recurses() -> object:
    return recurses()


class Asked:
    """Answers what the test wants to know of its process."""

    def reset(self, prompt: Prompt) -> str:
        if prompt.text == "memory":
            bytearray(2**33)
        return os.environ.get(prompt.text, "none")

    async def step(self, turn: Turn) -> Step:
        (call,) = turn.reply.tool_calls
        return Step(
            str(os.getpid()), call.arguments["a"] + turn.logprobs[0] + turn.num_prompt_tokens
        )


BEHAVIOURS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "hangs": hangs,
    "recurses": recurses,
    "sys_exit": lambda: sys.exit(3),
    "exits": lambda: os._exit(3),
    "garbage": lambda: object(),
    "bytes": lambda: Step(b"\x00\xff"),
    "number": lambda: Step(5),
    "nan_reward": lambda: Step([8], reward=float("nan")),
    "text_reward": lambda: Step([8], reward="1"),
    "list_metrics": lambda: Step([8], metrics=[1]),
    "text_metric": lambda: Step([8], metrics={"a": "b"}),
    "unknown_id": lambda: Step([8, 64]),
    "negative_id": lambda: Step([-1]),
    "mixed": lambda: Step(["w8", 8]),
    "assistant": lambda: Step([{"role": "assistant", "content": "w8"}]),
    "no_role": lambda: Step([{"content": "w8"}]),
    "megabytes": lambda: Step("w8 " * (MEGABYTES // 3)),
    "gigabyte": lambda: Step("w" * 2**27),
}
DEADLY = ("exits", "gigabyte")
"""Only for an environment in a process of its own."""
AT_RESET = ("raises", "hangs", "recurses", "sys_exit", "exits", "garbage")
"""What `reset` may do wrong as well; a Step is one more."""
ONLY_LATER = (
    "bytes",
    "number",
    "unknown_id",
    "negative_id",
    "mixed",
    "assistant",
    "no_role",
    "megabytes",
    "gigabyte",
)
"""Wrong only as what the model would read next: not at the last step."""


class OfNumpy:
    """Answers in numbers and truth values of numpy."""

    def reset(self, prompt: Prompt) -> None:
        self.turns = np.int64(0)

    def step(self, turn: Turn) -> Any:
        self.turns += 1
        is_done = self.turns == 2
        return Step(
            np.array([9]), np.float32(0.5) if is_done else is_done, is_done, {"is_last": is_done}
        )
