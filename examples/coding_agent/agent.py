"""An agent that mends a repository with a shell and an editor of the sandbox.

agent.function = "examples.coding_agent.agent:rollout"
agent.renderer = "qwen3"
data.chat_template = false     # the function writes the messages
"""

from __future__ import annotations

import asyncio
from typing import Any

from examples.coding_agent.repositories import passed_frac, repositories
from megatron_rl.records import Prompt
from megatron_rl.reward.sandbox.workspace import Workspace
from megatron_rl.rollout.agents import ContextFull, Episode, Session

MAX_TURNS = 4


async def rollout(session: Session, prompt: Prompt) -> Episode:
    repository = repositories()[int(prompt.label)]
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    edits = 0
    with Workspace(repository.files) as workspace:
        # a larger model takes workspace.tools; these two leave room in a context of 512
        tools = [workspace.shell, workspace.replace]
        try:
            while len(session.turns) < MAX_TURNS:
                turn = await session.generate(messages, tools=tools)
                answers = await session.call_tools(turn)
                if not answers:
                    break
                edits += sum(answer["content"] == f"wrote {repository.path}" for answer in answers)
                messages += [turn.message, *answers]
        except ContextFull:
            pass
        passed = await asyncio.to_thread(passed_frac, repository, workspace)
    return session.finish(passed, {"edits": edits, "solved": float(passed == 1.0)})
