"""An episode that speaks /v1/completions and is cut short continues with the sequences that it had,
after its groups were saved and read again.
"""

import asyncio
import itertools
import threading
from dataclasses import replace

import pytest
from openai import AsyncOpenAI

from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from tests.fake_server import FakeServer, wait_for
from tests.unit.rollout.test_endpoint import PROMPT, TOKENIZER, chat_sample, check_every_token_once
from tests.unit.rollout.test_unfinished_chats import SAMPLING, client_of

RAW_SAMPLING = replace(SAMPLING, truncation=None)
ran, go_on, seen = threading.Event(), threading.Event(), []


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


async def asks_in_raw_prompts(session, prompt):
    access = await session.open_endpoint()
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:

        async def ask(prompt, n=1):
            answer = await client.completions.create(
                model="m", prompt=prompt, max_tokens=100, n=n,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            return answer.choices

        (first,) = await ask(encode("one?"))
        second, third = await ask("a text?", n=2)
        seen.append([choice.token_ids for choice in (first, second, third)])
        ran.set()
        await asyncio.sleep(0 if go_on.is_set() else 60)
        await ask([*encode("one?"), *first.token_ids, *encode(" two?")])
        await ask(f"a text?{third.text}<|im_end|> more?")
    return session.finish(1.0)


def test_raw_prompts_continue_after_an_interruption_with_the_sequences_that_they_had(tmp_path):
    ran.clear()
    go_on.clear()
    seen.clear()
    numbers = itertools.count()

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, lambda _: f"answer {next(numbers)}")

    groups, agent = [Group(PROMPT, 1)], {"function": f"{__name__}:asks_in_raw_prompts"}
    with FakeServer("ok", source=source) as server:
        first = client_of(server, **agent)
        stop = threading.Thread(
            target=lambda: (wait_for(ran.is_set, 60), first.stop(keep_parts=True))
        )
        stop.start()
        with pytest.raises(asyncio.CancelledError):
            first.fill(groups, RAW_SAMPLING)
        stop.join()
        write_groups(tmp_path / "rollouts_00000.safetensors", copied(groups), [0])
        groups = read_groups(find_groups(tmp_path), [PROMPT], [0], slice(None))
        assert len(server.requests) == 3
        go_on.set()
        client = client_of(server, **agent)
        client.fill(groups, RAW_SAMPLING)
        assert len(server.requests) == 5, "a recorded turn was sampled again"
        assert (client.counters.resumed_episodes, client.counters.diverged_episodes) == (1, 0)
        (rollout,) = groups[0].rollout_group().rollouts
        check_every_token_once(server, rollout)
    assert seen[0] == seen[1], "the program reads the answers that it had"
    first, second, third = map(TOKENIZER.decode, seen[0])
    assert sorted(TOKENIZER.decode(sequence.tokens) for sequence in rollout.sequences) == sorted(
        [
            f"a text?{second}",
            f"a text?{third} more?answer 4<|im_end|>",
            f"one?{first} two?answer 3<|im_end|>",
        ]
    )
