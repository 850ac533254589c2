"""Two attempts: after a wrong answer the question is asked again.  For the tiny model, whose text
is "12+34=":

    torchrun ... -m megatron_rl.train --config examples/tiny_cpu/demo.toml \\
        --agent.function examples.agents.two_attempts:rollout --rollout.max_response_tokens 24
"""

from __future__ import annotations

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Episode, Session


async def rollout(session: Session, prompt: Prompt) -> Episode:
    for reward in (1.0, 0.5):
        turn = await session.generate(max_tokens=6)
        if turn.text.strip() == prompt.label:
            return session.finish(reward, {"attempts": len(session.turns)})
        session.observe(prompt.text)
    return session.finish(0.0, {"attempts": len(session.turns)})
