"""An agent of the openai-agents package, in an environment of its own that has nothing of the
trainer.

    python -m venv .venv-agents && .venv-agents/bin/pip install openai-agents==0.4.2

    agent.command = [".venv-agents/bin/python", "examples/agents/framework_agent.py"]
    agent.preload = ["agents"]     # imported once (seconds), each episode is forked
    agent.renderer = "qwen3"
    data.chat_template = false

`make demo-agent ARGS="--agent.command [...] --agent.preload [...]"` trains the tiny model that
chats with it.  Not run with a large model.
"""

from __future__ import annotations

import json
import operator as operators
import sys
from typing import Literal

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_tracing_disabled

OPERATORS = {"+": operators.add, "-": operators.sub, "*": operators.mul, "/": operators.truediv}


@function_tool
def calculate(a: float, operator: Literal["+", "-", "*", "/"], b: float) -> str:
    """Calculate with two numbers."""
    return str(OPERATORS[operator](a, b))


def main() -> None:
    question = json.loads(sys.stdin.readline())
    set_tracing_disabled(True)
    agent = Agent("calculator", model="policy", tools=[calculate])
    calls = 0
    try:
        result = Runner.run_sync(agent, question["text"], max_turns=8)
    except MaxTurnsExceeded:
        reward = 0.0
    else:
        reward = float(question["label"] in str(result.final_output))
        calls = sum(item.type == "tool_call_item" for item in result.new_items)
    print(json.dumps({"reward": reward, "metrics": {"calls": calls}}))


if __name__ == "__main__":
    main()
