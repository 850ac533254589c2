"""An agent that mends a repository with a shell and an editor of the sandbox.

    agent.function = "examples.coding_agent.agent:rollout"
    agent.renderer = "qwen3"
    data.chat_template = false     # the function writes the messages

The tiny model takes `rollout_tiny`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from examples.coding_agent.repositories import PATH, passed_frac, repositories
from megatron_rl.records import Prompt
from megatron_rl.reward.sandbox.workspace import Workspace
from megatron_rl.rollout.agents import ContextFull, Episode, Session

MAX_TURNS = 4


async def rollout(session: Session, prompt: Prompt) -> Episode:
    """Mend the repository with all tools of a workspace."""
    return await mend(session, prompt, ["shell", "view", "create", "replace"])


async def rollout_tiny(session: Session, prompt: Prompt) -> Episode:
    """Mend it with one tool: all four are too long for the tiny model, which has 512 positions."""
    return await mend(session, prompt, ["replace"])


async def mend(session: Session, prompt: Prompt, names: list[str]) -> Episode:
    repository = repositories()[int(prompt.label)]
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    edits = 0
    with Workspace(repository.files) as workspace:
        tools = [tool for tool in workspace.tools if tool.__name__ in names]
        try:
            while len(session.turns) < MAX_TURNS:
                turn = await session.generate(messages, tools=tools)
                answers = await session.call_tools(turn)
                if not answers:
                    break
                edits += sum(answer["content"] == f"wrote {PATH}" for answer in answers)
                messages += [turn.message, *answers]
        except ContextFull:
            pass
        passed = await asyncio.to_thread(passed_frac, repository, workspace)
    return session.finish(passed, {"edits": edits, "solved": float(passed == 1.0)})
