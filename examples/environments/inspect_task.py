"""An agent of inspect-ai with a tool."""

from __future__ import annotations

import asyncio
import json
import operator as operators
import os
import sys

from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.tool import tool

OPERATORS = {"+": operators.add, "-": operators.sub, "*": operators.mul, "/": operators.truediv}
MAX_TURNS = 8


@tool
def calculate():
    async def execute(a: float, operator: str, b: float) -> str:
        """Calculate with two numbers.

        Args:
            a: first number
            operator: one of + - * /
            b: second number
        """
        return str(OPERATORS[operator](a, b))

    return execute


async def main() -> None:
    question = json.loads(sys.stdin.readline())
    url = os.environ["OPENAI_BASE_URL"]
    # without responses_api it asks a question of its own, from which the model would learn
    model = get_model("openai/policy", base_url=url, responses_api=False)
    messages: list = [ChatMessageUser(content=question["text"])]
    calls = 0
    for _ in range(MAX_TURNS):
        output = await model.generate(messages, tools=[calculate()])
        messages.append(output.message)
        if not output.message.tool_calls:
            break
        answers, _ = await execute_tools(messages, [calculate()])
        calls += len(answers)
        messages += answers
    reward = float(question["label"] in messages[-1].text)
    print(json.dumps({"reward": reward, "metrics": {"calls": calls}}))


if __name__ == "__main__":
    asyncio.run(main())
