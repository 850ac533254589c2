"""Trains on an environment of verifiers 0.4.0 (https://pypi.org/project/verifiers), which verifiers
itself runs: its task, its tool server and its chat program talk to the model through the endpoint.

    agent.command = ["VERIFIERS/bin/python", "examples/agents/verifiers_env.py"]
    agent.renderer = "qwen3"
    data.chat_template = false     # verifiers writes the messages

VERIFIERS is a Python environment of its own, with its bin on PATH (`pip install verifiers==0.4.0
uv`): verifiers needs openai 2.54 or newer, SGLang 0.5.21 pins 2.6.1.

NOT RUN with a model that knows tool calls.  Tested: against a server with fixed answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers_product import Product, ProductData  # another environment is used in the same way

# for the tool server; an installed environment needs no path
os.environ["PYTHONPATH"] = str(Path(__file__).parent)


async def main() -> None:
    row = json.loads(sys.stdin.readline())
    task = Product(ProductData(id=row["id"], prompt=row["text"], answer=row["label"]))
    endpoint = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    agent = vf.make_agent(
        vf.AgentConfig(
            harness={"id": "null"},
            runtime=vf.SubprocessConfig(),
            model="policy",
            client=endpoint,
            max_turns=8,
        )
    )
    trace = await agent.run(task)
    if trace.errors:
        raise RuntimeError(f"verifiers: {trace.errors[0].type}: {trace.errors[0].message}")
    print(json.dumps({"reward": trace.reward, "metrics": {"turns": trace.num_turns}}))


if __name__ == "__main__":
    asyncio.run(main())
