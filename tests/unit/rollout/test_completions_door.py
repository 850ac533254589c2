"""The endpoint for OpenAI's completions, with the real openai package: text and token ids as
prompts, sequences that they continue, and every sampled token learned from once.
"""

import asyncio
import zlib
from functools import partial

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.rollout.agents.episode import EpisodeError
from megatron_rl.rollout.agents.fields import checked
from megatron_rl.rollout.agents.question import ApiError, RawQuestion
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.agents.text_completions import TextCompletionRequest, as_prompts
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from tests.fake_server import VERSION, FakeServer, wait_for
from tests.faults.samples import make_sample, random_routes
from tests.unit.rollout.test_endpoint import (
    CHAT_SPEC,
    MULTIPLY,
    PROMPT,
    TOKENIZER,
    chat_sample,
    check_every_token_once,
    sample,
)

END = TOKENIZER.eos_token_id
STORY = "one two. Observation: three"
TOKEN_IDS = {"return_token_ids": True}


def says(conversation):
    """A story with a stop text; then the number of questions."""
    count = conversation.count("?")
    return STORY if count == 1 else f"answer {count}"


def source(body, prompt, sample_id):
    return chat_sample(body, prompt, sample_id, reply=says)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def observed(rollout):
    """The texts between the turns of a sequence."""
    return [TOKENIZER.decode(rollout.tokens[a:b]) for a, b in rollout.environment]


async def connected(session):
    endpoint = await session.open_endpoint()
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


seen = []


async def extends_token_ids(session, prompt):
    async with await connected(session) as client:
        ids, returned = encode("one?"), []
        for question in (" two?", " three?", None):
            answer = await client.completions.create(
                model="any", prompt=ids, max_tokens=200, logprobs=0, extra_body=TOKEN_IDS
            )
            (choice,) = answer.choices
            # exactly as given
            assert choice.prompt_token_ids == ids and choice.finish_reason == "stop"
            assert choice.token_ids == [*encode(choice.text), END]
            assert choice.logprobs.tokens[-1] == "<|im_end|>" and not choice.logprobs.top_logprobs
            assert answer.usage.prompt_tokens == len(ids) and answer.model == "any"
            assert answer.usage.completion_tokens == len(choice.token_ids)
            seen.extend(choice.logprobs.token_logprobs)
            returned.append(choice.text)
            ids = [*ids, *choice.token_ids, *encode(question or "")]
        assert returned == [STORY, "answer 2", "answer 3"]
    return session.finish(1.0)


async def extends_texts(session, prompt):
    async with await connected(session) as client:
        text = "one?"
        for question in (" two?", " three?", None):
            # as clients may: a list with one prompt
            answer = await client.completions.create(
                model="m", prompt=[text], max_tokens=200, logprobs=1
            )
            (choice,) = answer.choices
            seen.extend(choice.logprobs.token_logprobs)
            # the program writes its format, as that of the model
            text += f"{choice.text}<|im_end|>{question}"
    return session.finish(1.0)


async def extends_streams(session, prompt):
    async with await connected(session) as client:
        ids = encode("one?")
        for question in (" two?", " three?", None):
            stream = await client.completions.create(
                model="m", prompt=ids, max_tokens=200, logprobs=0, stream=True,
                stream_options={"include_usage": True}, extra_body=TOKEN_IDS,
            )  # fmt: skip
            first, last, used = [chunk async for chunk in stream]
            (choice,), (end,) = first.choices, last.choices
            assert first.object == "text_completion" and choice.finish_reason is None
            assert (end.text, end.finish_reason, used.choices) == ("", "stop", [])
            assert choice.prompt_token_ids == ids
            assert used.usage.total_tokens == len(ids) + len(choice.token_ids)
            seen.extend(choice.logprobs.token_logprobs)
            ids = [*ids, *choice.token_ids, *encode(question or "")]
    return session.finish(1.0)


@pytest.mark.parametrize("function", [extends_token_ids, extends_texts, extends_streams])
def test_a_prompt_that_extends_an_answer_continues_its_sequence(function):
    seen.clear()
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, function)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 3
    assert observed(rollout) == [" two?", " three?"]
    assert rollout.tokens[: rollout.prompt_length].tolist() == encode("one?")
    assert seen == rollout.rollout_logprobs.tolist() and not counters.unread_turns
    # tokens in, tokens out
    inputs = [request["input_ids"][0] for request in server.requests]
    for (_, end), given in zip(rollout.environment, inputs[1:], strict=True):
        assert given == rollout.tokens[:end].tolist()


def spelled(body, prompt, sample_id):
    """The text "<think>" letter by letter, which the tokenizer would write with one token."""
    tokens = np.array([*(token for letter in "<think>" for token in encode(letter)), END])
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    routes = random_routes(rng, len(prompt) + len(tokens) - 1)
    sampled = make_sample(body, sample_id, len(prompt), tokens, -rng.random(len(tokens)), routes)
    sampled["meta_info"]["finish_reason"] = {"type": "stop", "matched": END}
    return sampled


def test_sampled_tokens_are_not_tokenized_again():
    seen.clear()
    with FakeServer("ok", source=spelled) as server:
        rollout, _ = sample(server, extends_texts)
        check_every_token_once(server, rollout)
    assert len(encode("<think>")) == 1 and len(rollout.sequences) == 1 and rollout.num_spans == 3
    assert len(server.requests[1]["input_ids"][0]) == len("one?<think>") + 1 + len(" two?")


async def asks_with_a_stop(session, prompt):
    async with await connected(session) as client:

        async def ask(text, **settings):
            answer = await client.completions.create(
                model="m", prompt=text, max_tokens=200, stop="Observation:", **settings
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        said = await ask("one?")
        assert said == "one two. "
        # a loop that writes the stop text again, with its answer
        assert await ask(f"one?{said}Observation: 4?") == "answer 2"
    return session.finish(1.0)


def test_a_stop_text_that_was_sampled_is_not_observed_again():
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, asks_with_a_stop)
    assert len(rollout.sequences) == 1 and observed(rollout) == [" 4?"]
    assert TOKENIZER.decode(rollout.tokens) == "one?one two. Observation: 4?answer 2<|im_end|>"
    assert counters.after_stop_tokens == len(encode(" three")) + 1


async def asks_for_other_sequences(session, prompt):
    async with await connected(session) as client:

        async def ask(prompt, **settings):
            answer = await client.completions.create(
                model="m", prompt=prompt, max_tokens=200, **settings
            )
            return answer

        answer = await ask("one?")
        text = f"one?{answer.choices[0].text}"
        await ask(f"{text} two?")  # without the token that ended the turn: another input
        await ask(f"{text[:-1]}<|im_end|> two?")  # an edited answer
        await ask(f"{text}<|im_end|> two?")  # continues the first
        await ask(f"{text}<|im_end|> two?")  # the same again: equal tokens
        await ask(f"{text}<|im_end|>")  # nothing was added
        both = await ask(["a?", encode("bb?")], n=2, extra_body=TOKEN_IDS)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        given = [choice.prompt_token_ids for choice in both.choices]
        assert given == [encode("a?")] * 2 + [encode("bb?")] * 2
        assert both.usage.prompt_tokens == 5
        assert both.usage.completion_tokens == 4 * (len(STORY) + 1)
    return session.finish(1.0)


def test_a_prompt_that_extends_nothing_begins_a_sequence():
    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, asks_for_other_sequences, max_tokens=1500)
        check_every_token_once(server, rollout)
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1] * 8 + [2]
    inputs = [TOKENIZER.decode(request["input_ids"][0]) for request in server.requests[:6]]
    assert inputs == [
        "one?", f"one?{STORY} two?", f"one?{STORY[:-1]}<|im_end|> two?",
        *[f"one?{STORY}<|im_end|> two?"] * 2, f"one?{STORY}<|im_end|>",
    ]  # fmt: skip


async def mixes_protocols(session, prompt):
    async with await connected(session) as client:
        messages = [{"role": "user", "content": "one?"}]
        first = await client.chat.completions.create(
            model="m", messages=messages, tools=[MULTIPLY], extra_body=TOKEN_IDS
        )
        ids = [*first.prompt_token_ids, *first.choices[0].token_ids, *encode("\nmore")]
        await client.completions.create(model="m", prompt=ids, max_tokens=200)
        # messages continue the first turn a second time
        messages += [first.choices[0].message, {"role": "user", "content": "two?"}]
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=[MULTIPLY], stream=True, extra_body=TOKEN_IDS
        )
        chunks = [chunk async for chunk in stream]
        start = [*first.prompt_token_ids, *first.choices[0].token_ids]
        assert chunks[0].prompt_token_ids[: len(start)] == start
        assert chunks[0].choices[0].token_ids[-1] == END
    return session.finish(1.0)


def test_token_ids_continue_a_conversation():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, mixes_protocols, max_tokens=1500)
        check_every_token_once(server, rollout)
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 2]
    longer = max(rollout.sequences, key=lambda sequence: sequence.num_spans)
    assert observed(longer) == ["\nmore"]


async def asks_again(session, prompt):
    async with await connected(session) as client:
        create = partial(client.completions.create, model="m", max_tokens=200)
        first = await create(prompt="one?", extra_body=TOKEN_IDS)
        more = [*encode("one?"), *first.choices[0].token_ids, *encode(" two?")]
        given_up = asyncio.create_task(create(prompt=more))
        await asyncio.to_thread(wait_for, lambda: session.counters.requests == 2, 60)
        given_up.cancel()
        await asyncio.wait([given_up])
        await asyncio.sleep(0.05)  # the endpoint has noticed
        await create(prompt=more)
    return session.finish(1.0)


def test_a_request_that_is_sent_again_is_learned_from_once():
    with FakeServer("ok", "hang", "ok", source=source) as server:
        rollout, _ = sample(server, asks_again)
        check_every_token_once(server, rollout)
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 1]
    inputs = [request["input_ids"][0] for request in server.requests]
    assert len(inputs) == 3 and inputs[1] == inputs[2]


async def stops_at_tokens(session, prompt):
    async with await connected(session) as client:
        stop_token_ids = encode("t")
        answer = await client.completions.create(
            model="m", prompt="one?", extra_body={"stop_token_ids": stop_token_ids, **TOKEN_IDS}
        )
        assert len(answer.choices[0].token_ids) == 16  # OpenAI's default, and the fake stops there
        assert answer.choices[0].finish_reason == "length"
        # half a character, which openai's client does not send
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as http:
            again = await http.post("completions", content=b'{"prompt": "\\ud83d?"}')
        assert again.json()["choices"][0]["text"] == "answer 2"
    return session.finish(1.0)


def test_a_program_without_a_chat_format_is_served():
    """No agent.renderer; the answer has OpenAI's 16 tokens where the request has no max_tokens."""
    cfg = RolloutConfig(max_retries=1, idle_timeout_seconds=20.0)
    agent = AgentConfig(function=f"{__name__}:stops_at_tokens")
    with FakeServer("ok", source=source) as server:
        runner = EpisodeRunner(agent, TOKENIZER, CHAT_SPEC.vocab_size, 1, (2000, "the test"))
        client = RolloutClient(
            [server.url], cfg, SampleRules(CHAT_SPEC, want_routes=True), episodes=runner
        )
        (group,) = client.generate(
            [PROMPT], 1, policy_version=VERSION, temperature=1.0, max_tokens=600, stop_token_ids=()
        )
        check_every_token_once(server, group.rollouts[0])
    assert server.requests[0]["sampling_params"]["stop_token_ids"] == encode("t")
    assert TOKENIZER.decode(server.requests[1]["input_ids"][0]) == "??"


REFUSED = {
    "temperature = 0.5: must be the run's, 1": {"temperature": 0.5},
    "top_p = 0.9: must be 1 in training": {"top_p": 0.9},
    "logprobs = 2: Input should be less than or equal to 1": {"logprobs": 2},
    "echo = True": {"echo": True},
    "best_of = 2": {"best_of": 2},
    "suffix = 'x': the model writes what follows the prompt": {"suffix": "x"},
    "max_tokens = 0": {"max_tokens": 0},
    "stop = '': must be a text": {"stop": ""},
    "prompt = .*: must be a text, token ids, or a list of either": {"prompt": [1, "a"]},
    "prompt = .*: must be a text, token ids, or a list .*": {"prompt": [[True]]},
    "prompt = \\[\\]: must be a text": {"prompt": []},
    "at least one token": {"prompt": ""},
    "the prompt has token id 999, the model's vocabulary has": {"prompt": [1, 999]},
    "the prompt has token id -1, the model's vocabulary has": {"prompt": [-1]},
    "the prompt has token id 998, the model's vocabulary has": {"prompt": [[5, 9], [998]]},
    "stop_token_ids: 999: the model's vocabulary": {"extra_body": {"stop_token_ids": [999]}},
    "ignore_eos = True: is not known here": {"extra_body": {"ignore_eos": True}},
}
NEUTRAL = {
    "temperature": 1, "top_p": 1, "echo": False, "best_of": 1, "seed": 1, "user": "me",
    "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip


async def asks_for_what_is_refused(session, prompt):
    async with await connected(session) as client:
        create = partial(client.completions.create, model="m")
        for why, wrong in REFUSED.items():
            with pytest.raises(BadRequestError, match=why) as refusal:
                await create(**{"prompt": "one?", **wrong})
            named = next(iter(wrong.get("extra_body", wrong)))
            assert refusal.value.type == "invalid_request_error" and refusal.value.param == named
        several = RawQuestion(prompts=[[5, 9], [998]])
        with pytest.raises(EpisodeError, match="token id 998"):  # before the first one is sampled
            several.turns(session, [])
        for longer in ("x" * 10**6, [1] * 2001):
            with pytest.raises(BadRequestError, match="more than the test allows") as full:
                await create(prompt=longer)
            assert full.value.code == "context_length_exceeded" and full.value.param == "prompt"
        await create(prompt="one?", **NEUTRAL)
    return session.finish(1.0)


def test_what_would_change_the_distribution_is_refused_by_name():
    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, asks_for_what_is_refused)
        check_every_token_once(server, rollout)
    assert len(server.requests) == 1


def test_a_prompt_may_be_one_or_several():
    assert as_prompts("a") == ["a"] and as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts(["a", [1]]) == ["a", [1]]
    for wrong in (None, 3, {}, [], [[]], [1.0], [True], ["a", 1]):
        with pytest.raises(ValueError, match="must be a text"):
            as_prompts(wrong)
    with pytest.raises(ApiError, match="body: must be a JSON object"):
        checked(TextCompletionRequest, [], 1.0)
