"""A calculator that the model may call as often as it likes, in the chat format of its family.

    agent.function = "examples.agents.calculator:rollout"
    agent.renderer = "qwen3"

NOT RUN with a model that knows tool calls: none was available.  Tested: the format and every kind
of call.
"""

from __future__ import annotations

import json
import operator
import re

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Episode, Session

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
MAX_CALLS = 8


async def rollout(session: Session, prompt: Prompt) -> Episode:
    errors = 0
    for _ in range(MAX_CALLS):
        turn = await session.generate(max_tokens=1024)
        calls = CALL.findall(turn.text)
        if not calls:
            break
        answers = [calculate(call) for call in calls]
        errors += sum(answer.startswith("error") for answer in answers)
        session.observe([{"role": "tool", "content": answer} for answer in answers])
    # reward.function scores
    return session.finish(metrics={"calls": len(session.turns) - 1, "tool_errors": errors})


def calculate(call: str) -> str:
    """The answer to {"name": "calculate", "arguments": {"a": 1, "operator": "+", "b": 2}}; text
    that starts with "error".
    """
    try:
        arguments = json.loads(call)["arguments"]
        return str(OPERATORS[arguments["operator"]](float(arguments["a"]), float(arguments["b"])))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        return f"error: {type(error).__name__}: {error}"  # the model learns from it
