"""The tiny model and a calculator: "37*48+25=" -> [37*48] -> =1776 -> [1776+25] -> =1801 -> 1801.

    agent.function = "examples.tools_cpu.calculator:rollout"

A turn that begins with "[" is a call.  Any other is the final answer, which the reward compares
with the label.
"""

from __future__ import annotations

import operator
import re

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Episode, Session

CALL = re.compile(r"\[(\d+)([*+])(\d+)\]")
OPERATORS = {"*": operator.mul, "+": operator.add}
ERROR = "=? "
MAX_CALLS, TURN_TOKENS = 3, 12


async def rollout(session: Session, prompt: Prompt) -> Episode:
    errors = 0
    turn = await session.generate(max_tokens=TURN_TOKENS)
    while turn.text.startswith("[") and len(session.turns) <= MAX_CALLS:
        answer = calculate(turn.text)
        errors += answer == ERROR
        session.observe(answer)
        turn = await session.generate(max_tokens=TURN_TOKENS)
    return session.finish(
        float(turn.text == prompt.label),
        {"tool_calls": len(session.turns) - 1, "tool_errors": errors},
    )


def calculate(call: str) -> str:
    """Return "=1776 " for "[37*48]", or ERROR for text that is not a call, from which the model
    learns.
    """
    match = CALL.fullmatch(call)
    return f"={OPERATORS[match[2]](int(match[1]), int(match[3]))} " if match else ERROR
