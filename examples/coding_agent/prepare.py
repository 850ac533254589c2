"""Writes the rows of the example.

    python -m examples.coding_agent.prepare DIR

train.jsonl, heldout.jsonl: prompts; the label is the number of the repository.
sft.jsonl, sft_mini.jsonl: conversations of agent.py and of mini_swe.py on the prompts of training.
A quarter of them mends the code with a wrong token: RL must discover what the tests want.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.coding_agent.repositories import PATH, Repository, repositories
from megatron_rl.reward.sandbox.workspace import Workspace
from megatron_rl.rollout.agents.tools import Tools

NUM_HELDOUT, WRONG_EVERY = 64, 4
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
    chosen = repositories()[NUM_HELDOUT:]
    sets = {
        "train": rows[NUM_HELDOUT:],
        "heldout": rows[:NUM_HELDOUT],
        "sft": [with_our_tool(repository, new) for repository, new in edits(chosen)],
        "sft_mini": [with_mini_swe(repository, new) for repository, new in edits(chosen)],
    }
    for name, lines in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
        print(f"wrote {folder / name}.jsonl: {len(lines)} rows")


def edits(chosen: Sequence[Repository]) -> Iterator[tuple[Repository, str]]:
    """Yield each repository with an expression in the place of the wrong one."""
    draw = random.Random(0)
    for number, repository in enumerate(chosen):
        is_right = number % WRONG_EVERY
        yield repository, repository.right if is_right else draw.choice(repository.others)


def with_our_tool(repository: Repository, new: str) -> dict[str, Any]:
    """Return a conversation of agent.py."""
    messages = [
        {"role": "user", "content": repository.task},
        call("replace", path=PATH, old=repository.wrong, new=new),
        {"role": "tool", "content": f"wrote {PATH}"},
        {"role": "assistant", "content": "Done."},
    ]
    return {"messages": messages, "tools": Tools([Workspace().replace]).schemas}


def with_mini_swe(repository: Repository, new: str) -> dict[str, Any]:
    """Return a conversation of mini_swe.py."""
    old = repository.wrong.replace("*", "[*]")  # sed reads a pattern
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": repository.task},
        call("bash", command=f"sed -i 's/{old}/{new}/' {PATH}; {SUBMIT}"),
    ]
    return {"messages": messages, "tools": [BASH]}


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
