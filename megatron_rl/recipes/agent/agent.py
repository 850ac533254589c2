"""A program of the openai package with a calculator.  Nothing in it knows of training: replace it
by one of your own.

It is started for each episode: it reads a line {"text", "label", ...}, talks to the model through
OPENAI_BASE_URL, and prints {"reward", "metrics"} as its last line.
"""

from __future__ import annotations

import json
import operator
import sys
from typing import Any

from openai import OpenAI
from reward import score

MAX_TURNS = 8
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate with two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "operator": {"type": "string", "enum": list(OPERATORS)},
                "b": {"type": "number"},
            },
            "required": ["a", "operator", "b"],
        },
    },
}


def main() -> None:
    question = json.loads(sys.stdin.readline())
    client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
    messages: list = [{"role": "user", "content": question["text"]}]
    calls = 0
    for _ in range(MAX_TURNS):
        answer: Any = (
            client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATE])
            .choices[0]
            .message
        )
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or []:
            calls += 1
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": calculate(call.function.arguments),
                }
            )
        if not answer.tool_calls:
            break
    reward = score(question["text"], answer.content or "", question["label"])
    print(json.dumps({"reward": reward, "metrics": {"calls": calls}}))


def calculate(arguments: str) -> str:
    """Return the answer to {"a": 1, "operator": "+", "b": 2}, or text that starts with "error",
    from which the model learns.
    """
    try:
        call = json.loads(arguments)
        return str(OPERATORS[call["operator"]](float(call["a"]), float(call["b"])))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        return f"error: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
