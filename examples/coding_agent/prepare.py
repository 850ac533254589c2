"""Writes the rows of the example.

    python -m examples.coding_agent.prepare DIR    # train.jsonl, heldout.jsonl, sft.jsonl

A row's label is the number of its repository.  The conversations of sft.jsonl are in turn those of
agent.py and of mini_swe.py.  Half of them mend the code with a wrong token: RL must discover what
the tests want.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.coding_agent.repositories import Repository, repositories
from megatron_rl.reward.sandbox.workspace import Workspace
from megatron_rl.rollout.agents.tools import Tools

NUM_HELDOUT, NUM_SFT = 64, 640
SYSTEM = "You mend code."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""The tool of mini-swe-agent 2.4.6, as it describes it."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": repository.task, "label": str(number)}
        for number, repository in enumerate(repositories())
    ]
    sets = {
        "train": rows[NUM_HELDOUT:],
        "heldout": rows[:NUM_HELDOUT],
        "sft": conversations(repositories()[NUM_HELDOUT:][:NUM_SFT]),
    }
    for name, lines in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
        print(f"wrote {folder / name}.jsonl: {len(lines)} rows")


def conversations(chosen: tuple[Repository, ...]) -> list[dict[str, Any]]:
    draw, rows = random.Random(0), []
    workspace = Workspace()
    tools = Tools([workspace.shell, workspace.replace]).schemas
    for number, repository in enumerate(chosen):
        new = repository.right if number // 2 % 2 else draw.choice(repository.others)
        task = {"role": "user", "content": repository.task}
        if number % 2:
            command = f"sed -i 's/{repository.wrong}/{new}/' {repository.path}; {SUBMIT}"
            system = {"role": "system", "content": SYSTEM}
            messages, schemas = [system, task, call("bash", command=command)], [BASH]
        else:
            edit = {"path": repository.path, "old": repository.wrong, "new": new}
            answer = {"role": "tool", "content": f"wrote {repository.path}"}
            end = {"role": "assistant", "content": "Done."}
            messages, schemas = [task, call("replace", **edit), answer, end], tools
        rows.append({"messages": messages, "tools": schemas})
    return rows


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
