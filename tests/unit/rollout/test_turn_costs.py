"""The work of a turn depends on what is new in it, not on the length of its episode: it is counted
here, not timed.
"""

from functools import partial

import numpy as np
import pytest

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import rollouts
from megatron_rl.rollout.agents import conversation
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client import response
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_server import VERSION, FakeServer
from tests.unit.rollout.test_endpoint import CHAT_SPEC, PROMPT, TOKENIZER, USER, chat_sample

TURNS = 12
QUESTION = {"role": "user", "content": "And again, please?"}


async def observed(session, prompt):
    for _ in range(TURNS):
        turn = await session.generate()
        assert turn.reply.content == "6"
        session.observe([QUESTION])
    return session.finish(1.0)


async def listed(session, prompt):
    messages = [USER]
    for _ in range(TURNS):
        turn = await session.generate(messages)
        # other objects of the same texts, as clients of the endpoint send them
        messages = [*map(dict, messages), dict(turn.message), dict(QUESTION)]
    return session.finish(1.0)


@pytest.mark.parametrize("function", ["observed", "listed"])
def test_late_turns_take_no_more_than_early_ones(function, monkeypatch):
    work = {"rendered": [], "parsed": [], "digested": [], "tokens": [], "rows": []}
    sizes, digest = work["digested"], rollouts.routes_digest
    chained, decode = conversation.chained, response.decode_routed_experts

    def count_digest(tokens, *routes):
        work["tokens"].append(len(tokens))
        return digest(tokens, *routes)

    def count_rows(payload, *, num_rows, **shape):
        work["rows"].append(num_rows)
        return decode(payload, num_rows=num_rows, **shape)

    monkeypatch.setattr(rollouts, "routes_digest", count_digest)
    monkeypatch.setattr(response, "decode_routed_experts", count_rows)
    monkeypatch.setattr(
        conversation, "chained", lambda *values: sizes.append(values) or chained(*values)
    )
    runner = EpisodeRunner(
        AgentConfig(function=f"{__name__}:{function}", renderer="qwen3"),
        TOKENIZER,
        CHAT_SPEC.vocab_size,
        0,
    )
    bridge, parse = runner.chat._renderer.bridge_to_next_turn, runner.chat._renderer.parse_response

    def count_rendered(prompt, completion, *rest, **named):
        work["rendered"].append(len(prompt) + len(completion))
        return bridge(prompt, completion, *rest, **named)

    def count_parsed(completion, *, prompt_ids, **named):
        work["parsed"].append(len(prompt_ids) + len(completion))
        return parse(completion, prompt_ids=prompt_ids, **named)

    monkeypatch.setattr(runner.chat._renderer, "bridge_to_next_turn", count_rendered)
    monkeypatch.setattr(runner.chat._renderer, "parse_response", count_parsed)
    source = partial(chat_sample, reply=lambda text: "6")
    with FakeServer("ok", source=source) as server:
        client = RolloutClient(
            [server.url], RolloutConfig(), SampleRules(CHAT_SPEC, want_routes=True), episodes=runner
        )
        (group,) = client.fill([Group(PROMPT, 1)], Sampling(1.0, 4000, (), VERSION))
        starts = [body.get("routed_experts_start_len", 0) for body in server.requests]
    rollout = group.rollouts[0]
    assert rollout.num_spans == TURNS
    # the last digests are those of the record that is joined at the end
    for name in ("rendered", "parsed", "rows"):
        late = work[name][2 : TURNS - 1]
        assert len(late) >= TURNS - 3 and set(late) == {late[0]}, name
    per_turn = np.diff([end for end, _ in rollout.episode.turns])
    assert set(np.diff(starts)[1:]) == set(per_turn) == {work["rows"][2]}
    assert max(work["tokens"][:TURNS]) < len(rollout.tokens) / 2
    assert len(sizes) <= 1 + 4 * TURNS  # the tools of each request, and each message once
