"""data.sampling = pass_rate: the chance of a prompt, and the order that follows from it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataConfig
from megatron_rl.data.pass_rates import PassRates
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.rows import DataError
from megatron_rl.data.training_order import make_stream
from megatron_rl.records import Prompt
from tests.unit.data.test_mixture import prompts_of, stream_of


def source_of(count, least=0.1, **settings):
    settings = {"seed": 5, "shuffle": True} | settings
    return PromptSource(prompts_of("", count), rates=PassRates(count, least), **settings)


def results(*pairs):
    return np.array(pairs, np.int32).reshape(-1, 2).T


def test_the_chance_is_the_variance_of_a_reward_and_a_least_one():
    rates = PassRates(5, 0.2)
    rates.note(range(4), *results((0, 4), (1, 4), (2, 4), (4, 4)))
    expected = [0.2, 0.2 + 0.8 * 0.75, 1.0, 0.2, 1.0]
    assert [rates.chance(number) for number in range(5)] == pytest.approx(expected, abs=1e-12)
    assert rates.metrics() == {
        "data/sampled_prompts_frac": 0.8,
        "data/draw_chance_mean": pytest.approx(sum(expected) / 5),
    }
    # without a scored response nothing is known; of two results the later counts
    rates.note([0, 1, 1], *results((0, 0), (4, 4), (2, 4)))
    assert rates.rates[:2].tolist() == [0.0, 0.5] and math.isnan(rates.rates[4])


def test_without_results_and_with_a_chance_of_1_the_order_is_the_uniform_one():
    uniform = PromptSource(prompts_of("", 7), seed=5, shuffle=True)
    ids = [prompt.id for prompt in uniform.take(30)]
    assert [prompt.id for prompt in source_of(7).take(30)] == ids
    certain = source_of(7, least=1.0)
    certain.note(certain.prompts, *results(*[(0, 4)] * 7))
    assert [prompt.id for prompt in certain.take(30)] == ids


def test_prompts_are_drawn_as_often_as_their_chance_and_at_most_once_per_epoch():
    """2,000 epochs: of each prompt within 5 standard errors of the chance."""
    source, epochs = source_of(5, least=0.2), 2000
    source.note(source.prompts[:4], *results((0, 8), (1, 8), (4, 8), (8, 8)))
    counts = dict.fromkeys((prompt.id for prompt in source.prompts), 0)
    while source.epoch < epochs:
        counts[source.take(1)[0].id] += 1
    for number, prompt in enumerate(source.prompts):
        chance = source.rates.chance(number)
        error = math.sqrt(chance * (1 - chance) * epochs) + 1
        assert abs(counts[prompt.id] - chance * epochs) <= 5 * error, prompt.id


def expected_order(seed, size, least, notes, draws):
    """The draws of one file, one at a time; notes[k]: results noted before draw k."""
    rates, taken, epoch = [None] * size, [], 0
    while True:
        generator = np.random.default_rng([seed, epoch])
        order, coins = generator.permutation(size), generator.random(size)
        for number in order:
            for noted, passed, scored in notes.pop(len(taken), ()):
                rates[noted] = np.float32(passed / scored) if scored else rates[noted]
            if len(taken) == draws:
                return taken
            p = rates[number]
            chance = 1 if p is None else least + (1 - least) * 4 * float(p) * (1 - float(p))
            if coins[number] < chance:
                taken.append(int(number))
        epoch += 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.randoms()), max_size=10),
)
def test_an_order_with_results_and_resumes_is_that_of_the_reference(size, least, steps):
    """A step: number of prompts, whether the run is resumed after it, and its results."""
    source, numbers, notes = source_of(size, least), [], {}
    for count, is_resumed, random in steps:
        peeked = source.peek(count)
        taken = source.take(count)
        assert source.numbers(taken) == peeked
        numbers += peeked
        rows = [(random.randrange(5), random.choice([0, 4, 4])) for _ in taken]
        rows = [(min(passed, scored), scored) for passed, scored in rows]
        source.note(taken, *results(*rows))
        notes[len(numbers)] = [(n, *row) for n, row in zip(peeked, rows, strict=True)]
        if is_resumed:
            state = json.loads(json.dumps(source.state_dict()))
            source = source_of(size, least)
            source.load_state_dict(state)
            assert source.state_dict() == state
    assert numbers == expected_order(5, size, least, notes, len(numbers))


def test_a_mixture_keeps_its_counts_and_continues_with_its_rates():
    table = [(6, 2.0, "repeat"), (4, 1.0, "repeat")]
    stream = stream_of(table, least_chance=0.05)
    first = stream.take(9)
    stream.note(first, *results(*[(0, 4)] * 9))
    state = json.loads(json.dumps(stream.state_dict()))
    following = [prompt.id for prompt in stream.take(300)]
    assert sum(name.startswith("gsm8k") for name in following) == 200
    resumed = stream_of(table, least_chance=0.05)
    resumed.load_state_dict(state)
    assert [prompt.id for prompt in resumed.take(300)] == following
    names = {
        f"source/{name}/{metric}"
        for name in ("gsm8k", "math")
        for metric in ("epochs", "sampled_prompts_frac", "draw_chance_mean")
    }
    assert set(resumed.metrics()) == names
    assert resumed.metrics()["source/math/sampled_prompts_frac"] == 0.75


def test_checkpoints_of_the_other_sampling_and_broken_rates():
    chosen, uniform = source_of(6), PromptSource(prompts_of("", 6), seed=5, shuffle=True)
    chosen.note(chosen.take(2), *results((0, 4), (4, 4)))
    uniform.take(2)
    uniform.load_state_dict(chosen.state_dict())  # pass rates are not used
    # allowed by checkpoint.allow_changes: nothing is known yet
    unknown = source_of(6)
    unknown.load_state_dict(uniform.state_dict())
    assert np.isnan(unknown.rates.rates).all() and unknown.position == 2
    state = chosen.state_dict()
    for text, message in (("!", "cannot be read"), (PassRates(7, 1).to_text(), "of 7 prompts")):
        with pytest.raises(DataError, match=message):
            source_of(6).load_state_dict(state | {"pass_rates": text})
    with pytest.raises(DataError, match="numpy .* shuffles epoch 0 with seed 5 into another order"):
        source_of(6).load_state_dict(state | {"coins_crc32": 1})
    assert len(PassRates(1_000_000, 0.1).to_text()) < 30_000


def test_the_configuration_chooses_the_order(tmp_path):
    rows = {"": prompts_of("", 3)}
    one = make_stream(DataConfig(train="a.jsonl"), rows, 7)
    assert isinstance(one, PromptSource) and one.rates is None and one.seed == 7
    rated = make_stream(
        DataConfig(train="a.jsonl", sampling="pass_rate", least_chance=0.3, shuffle=False), rows, 7
    )
    assert rated.rates.least_chance == 0.3 and not rated.shuffle
    tables = [{"name": "math", "path": "m.jsonl", "when_used_up": "stop"}]
    mixed = make_stream(
        DataConfig(train=tables, sampling="pass_rate"), {"math": [Prompt("a", "", (1,), "")]}, 7
    )
    assert mixed.sources[0].rates.least_chance == 0.1 and not mixed.is_endless
