"""Turns that end at texts of several tokens: what is cut, returned and learned from."""

import asyncio
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import BadRequestError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt, Rollout
from megatron_rl.records.token_sets import TokenSets
from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.recorded import RecordedTurns
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.agents.stops import Stops, reply_before
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.counters import RolloutCounters
from megatron_rl.rollout.client.sampling import SampleRules
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import make_sample, random_routes
from tests.unit.rollout.test_endpoint import TOKENIZER, USER, chat_sample, connected, sample
from tests.words import sentencepiece_tokenizer

WORDS = "Observation: the answer is 42 \U0001f600 naïve ±∞ \n\n stop. stop: END </s> 日本語"
PROMPT = 5


def byte_pairs():
    """A tokenizer with tokens of several letters, and letters of several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator([WORDS.split("naïve")[0] * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BYTE_PAIRS = byte_pairs()


def turn_of(tokens, finish_reason="length"):
    """A turn whose every number names its place."""
    count, size = len(tokens), PROMPT + len(tokens)
    places = np.arange(count)
    return Rollout(
        id="r",
        tokens=np.array([*range(PROMPT), *tokens]),
        prompt_length=PROMPT,
        rollout_logprobs=-places.astype(np.float32),
        routed_experts=np.arange((size - 1) * 2, dtype=np.int16).reshape(size - 1, 1, 2),
        finish_reason=finish_reason,
        policy_versions=places // 3,
        sampling_mask=TokenSets.of(np.ones(count, np.int64), np.array(tokens)),
    )


def brute_force(tokens, stops):
    """The number of tokens at which a stop is in the text for the first time, None without one."""
    for count in range(1, len(tokens) + 1):
        text = BYTE_PAIRS.decode(tokens[:count], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return count
    return None


@pytest.mark.parametrize("seed", range(200))
def test_a_turn_is_cut_where_a_stop_is_complete_for_the_first_time(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 40)))
    text += WORDS[rng.randrange(len(WORDS)) :]
    tokens = BYTE_PAIRS.encode(text, add_special_tokens=False)
    starts = [rng.randrange(len(text)) for _ in range(3)]
    stops = [text[start : start + rng.randint(1, 9)] for start in starts]
    stops += ["never", "\U0001f600!"]
    if rng.random() < 0.2:
        stops = stops[3:]
    turn = turn_of(tokens, rng.choice(["length", "stop", "abort"]))
    cut, match = Stops(stops, BYTE_PAIRS).cut(turn)
    count = brute_force(tokens, stops)
    if count is None:
        assert cut is turn and match == (text, None, "")
        return
    whole = BYTE_PAIRS.decode(tokens[:count], skip_special_tokens=True)
    assert whole == match.before + match.after and match.after.startswith(match.stop)
    assert not any(stop in match.before for stop in stops)
    assert (cut.finish_reason, cut.prompt_length) == ("stop", PROMPT)
    assert cut.tokens.tolist() == turn.tokens[: PROMPT + count].tolist()
    assert cut.rollout_logprobs.tolist() == [-float(place) for place in range(count)]
    assert cut.policy_versions.tolist() == [place // 3 for place in range(count)]
    assert np.array_equal(cut.routed_experts, turn.routed_experts[: PROMPT + count - 1])
    kept = [cut.sampling_mask.part(place, place + 1).ids().tolist() for place in range(count)]
    assert kept == [[token] for token in tokens[:count]]


def test_of_two_stops_that_end_together_the_longer_one_is_named():
    tokens = BYTE_PAIRS.encode("a stop: b", add_special_tokens=False)
    _, match = Stops(["top:", "stop:", "b"], BYTE_PAIRS).cut(turn_of(tokens))
    assert match[:2] == ("a ", "stop:")


def test_of_two_stops_in_one_token_the_one_that_ends_first_is_named():
    texts = [BYTE_PAIRS.decode([token]) for token in range(len(BYTE_PAIRS))]
    text = max((text for text in texts if text.isascii() and text != "<end>"), key=len)
    assert len(text) >= 3
    tokens = BYTE_PAIRS.encode(text, add_special_tokens=False)
    cut, match = Stops([text, text[1]], BYTE_PAIRS).cut(turn_of(tokens))
    assert cut.response_length == len(tokens) == 1
    assert match == (text[0], text[1], text[1:])


def test_a_special_token_has_no_text_and_ends_a_turn():
    end = BYTE_PAIRS.eos_token_id
    stops = Stops(["<end>"], BYTE_PAIRS)
    assert stops.by_token == {end: "<end>"}
    tokens = [*BYTE_PAIRS.encode("the", add_special_tokens=False), end]
    cut, match = stops.cut(turn_of(tokens, "stop"))
    assert cut.tokens[-1] == end and match == ("the", "<end>", "")


@pytest.mark.parametrize(
    ("reply", "after", "expected"),
    [
        (Reply("one STOP: x", None, ()), "STOP: x", ("one ", None)),
        (Reply("STOP: one STOP:", None, ()), "STOP:\n", ("STOP: one ", None)),
        (Reply("STOP:", None, ()), "\nSTOP:\n", ("", None)),
        (Reply("one\n\nSTOP:", "STOP: thought", ()), "\n\nSTOP:", ("one", "STOP: thought")),
        (Reply("", "thinks STOP", ()), "STOP", ("", "thinks ")),
        (Reply("one", "thought", ()), "\n\n", ("one", "thought")),
        (Reply("one", None, ()), "", ("one", None)),
        (Reply("", None, ()), "STOP", ("", None)),
    ],
)
def test_a_reply_ends_before_the_stop(reply, after, expected):
    before = reply_before(reply, after)
    assert (before.content, before.reasoning) == expected


@pytest.mark.parametrize("finish_reason", ["abort", "stop"])
def test_a_recorded_turn_with_a_stop_is_complete_without_a_request(finish_reason):
    """The request that would continue an interrupted turn could only sample what is cut off."""
    tokens = BYTE_PAIRS.encode("a stop: b", add_special_tokens=False)
    session = SimpleNamespace(
        idle_since=0.0,
        prompt=Prompt(id="q", text="", token_ids=tuple(range(PROMPT)), label=""),
        name="r", server="", max_tokens=100, max_episode_tokens=0, sequence_limit=None,
        tokenizer=BYTE_PAIRS, chat=None, counters=RolloutCounters(), sample=None,
        recorded=RecordedTurns(turn_of(tokens, finish_reason)),
        check_open=lambda: None, asked=lambda branch: None,
        ended=lambda branch, **_: None,
    )  # fmt: skip
    branch = Branch(session, range(PROMPT))
    turn = asyncio.run(branch.sample(stops=["stop:"]))
    branch.accept(turn)
    assert (turn.text, turn.stop, turn.finish_reason) == ("a ", "stop:", "stop")
    assert BYTE_PAIRS.decode(branch.rollout.tokens[PROMPT:]) == "a stop:"
    left_out = len(tokens) - branch.rollout.response_length
    assert session.counters.after_stop_tokens == left_out > 0


SPACES = sentencepiece_tokenizer()


@pytest.mark.parametrize(
    "answer, stop, match",
    [
        (" Paris and", (), (" Paris and", None, "")),
        (" Paris and is", (" and",), (" Paris", " and", " and is")),
        (" and is", (" and",), ("", " and", " and is")),
    ],
)
def test_the_space_with_which_a_turn_begins_is_part_of_its_text(answer, stop, match):
    """A decoder of SentencePiece drops that of all that it decodes."""
    before = SPACES.encode("The capital is")
    sampled = np.array(SPACES.encode(f"The capital is{answer}")[len(before) :])
    assert not SPACES.decode(sampled).startswith(" ")
    assert Stops(stop, SPACES).match(sampled) == match


async def writes_on(session, prompt):
    text = "The capital is"
    async with await connected(session) as client:
        for stop in (None, " is"):
            answer = await client.completions.create(
                model="m", prompt=text, max_tokens=2, stop=stop
            )
            text += answer.choices[0].text
    assert text == "The capital is Paris and Paris and"
    return session.finish(1.0)


def test_a_text_that_continues_with_the_space_of_its_answer_is_one_sequence():
    def source(body, prompt, sample_id):
        tokens, routes = np.array([5, 6]), random_routes(np.random.default_rng(0), len(prompt) + 1)
        return make_sample(body, sample_id, len(prompt), tokens, -np.ones(2), routes)

    cfg = RolloutConfig(max_retries=0)
    runner = EpisodeRunner(AgentConfig(function=f"{__name__}:writes_on"), SPACES, 64, 0)
    with FakeServer("ok", source=source) as server:
        client = RolloutClient(
            [server.url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner
        )
        settings = {"policy_version": VERSION, "temperature": 1.0, "stop_token_ids": ()}
        prompts = [Prompt("q", "", (3, 4), "")]
        (group,) = client.generate(prompts, 1, max_tokens=64, **settings)
    (rollout,) = group.rollouts
    assert rollout.tokens.tolist() == [2, 3, 4, 5, 6, 5, 6] and not rollout.episode.earlier


# The endpoint -------------------------------------------------------------------------------------

STORY = "one two. Observation: three"


def says(conversation):
    return "again" if "more" in conversation else STORY


seen = []


async def stops_at_texts(session, prompt):
    stops = ["never", "Observation:"]
    async with await connected(session) as client:
        create = partial(client.chat.completions.create, model="m", stop=stops)
        first = await create(messages=[USER], n=2)
        for choice in first.choices:
            assert (choice.message.content, choice.finish_reason) == ("one two. ", "stop")
        said = {"role": "assistant", "content": "one two. "}
        more = await create(messages=[USER, said, {"role": "user", "content": "more"}])
        assert more.choices[0].message.content == "again"
        chunks = [chunk async for chunk in await create(messages=[USER], stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (text, chunks[-1].choices[0].finish_reason) == ("one two. ", "stop")
        with pytest.raises(BadRequestError, match="stop = '': must be a text"):
            await client.chat.completions.create(model="m", messages=[USER], stop="")
        seen.append(first.usage.completion_tokens)
    return session.finish(1.0)


async def stops_at_sequences(session, prompt):
    endpoint = await session.open_endpoint()
    async with AsyncAnthropic(base_url=endpoint.root_url, auth_token=endpoint.api_key) as client:
        message = await client.messages.create(
            model="m", messages=[USER], max_tokens=100, stop_sequences=["never", "Observation:"]
        )
        assert [block.text for block in message.content] == ["one two. "]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Observation:")
        seen.append(message.usage.output_tokens)
    return session.finish(1.0)


@pytest.mark.parametrize("function", [stops_at_texts, stops_at_sequences])
def test_what_follows_a_stop_is_neither_returned_nor_learned_from(function):
    seen.clear()
    with FakeServer("ok", source=partial(chat_sample, reply=says)) as server:
        rollout, counters = sample(server, function)
        answers = [
            (tuple(answer["output_ids"]), answer["meta_info"]["output_token_logprobs"])
            for answer in server.served.values()
        ]
    # two choices, of which the first was continued, and the stream
    assert len(rollout.sequences) == (3 if function is stops_at_texts else 1)
    cut_turns = 0
    for sequence in rollout.sequences:
        taken = 0
        for begin, end in sequence.turn_spans:
            turn = tuple(sequence.tokens[begin:end].tolist())
            logprobs = sequence.rollout_logprobs[taken : taken + len(turn)]
            taken += len(turn)
            # what was sampled begins with what is learned from
            sampled = [
                tokens
                for tokens, pairs in answers
                if tokens[: len(turn)] == turn
                and np.allclose([p for p, *_ in pairs[: len(turn)]], logprobs, atol=1e-5)
            ]
            assert len(sampled) == 1
            if len(turn) < len(sampled[0]):
                cut_turns += 1
                assert TOKENIZER.decode(turn) == "one two. Observation:"
    assert cut_turns == (3 if function is stops_at_texts else 1)
    left_out = len(TOKENIZER.encode(STORY + "<|im_end|>")) - len(
        TOKENIZER.encode("one two. Observation:")
    )
    assert counters.after_stop_tokens == cut_turns * left_out
    per_turn = len(TOKENIZER.encode("one two. Observation:"))
    assert seen == [per_turn * (2 if function is stops_at_texts else 1)]
