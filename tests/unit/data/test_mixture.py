"""The order of several sources against a reference that computes all draws by sorting."""

import hashlib
import itertools
import json
import zlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.mixture import MixedPrompts, Part
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.rows import DataError
from megatron_rl.records import Prompt

NAMES = ("gsm8k", "math", "code", "chat")


def prompts_of(name, count):
    return [Prompt(f"{name}:{i}", f"{name} {i}", (i,), "", source=name) for i in range(count)]


def parts_of(table):
    """[(number of prompts, weight, when used up), ...] -> the parts of a mixture."""
    return [
        Part(name, prompts_of(name, count), weight, policy)
        for name, (count, weight, policy) in zip(NAMES, table, strict=False)
    ]


def stream_of(table, seed=3, shuffle=True, **settings):
    return MixedPrompts(parts_of(table), seed=seed, shuffle=shuffle, **settings)


def expected_ids(table, seed, shuffle, most):
    """Return the ids of the first draws, `most` at most: all draws of all sources, sorted."""
    draws, end = [], None
    for index, (name, (count, weight, policy)) in enumerate(zip(NAMES, table, strict=False)):
        order = []
        for number in range(most):
            if number % count == 0:
                generator = np.random.default_rng(
                    [seed, number // count, zlib.crc32(name.encode())]
                )
                order = generator.permutation(count).tolist() if shuffle else list(range(count))
            hashed = hashlib.blake2b(f"{seed}\0{name}\0{number}".encode(), digest_size=4).digest()
            part = Fraction(int.from_bytes(hashed, "little"), 2**32) if shuffle else Fraction(1, 2)
            time = ((number + part) / Fraction(str(weight)), index)
            if number == count and policy != "repeat":
                end = min(end or time, time) if policy == "stop" else end
                break
            draws.append((time, f"{name}:{order[number % count]}"))
    return [name for time, name in sorted(draws) if end is None or time < end][:most]


tables = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.sampled_from([1.0, 2.0, 0.5, 0.1, 3.7, 1e-3, 20.0]),
        st.sampled_from(["repeat", "repeat", "stop", "drop"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    tables,
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.booleans()),
        max_size=12,
    ),
)
def test_steps_resumes_and_replicas_take_the_draws_of_the_reference(table, seed, shuffle, steps):
    """A step: replicas, prompts of each, how many of the last prompts are given back, and whether
    the run is resumed after it.
    """
    expected = expected_ids(table, seed, shuffle, 200)
    streams, place = [stream_of(table, seed, shuffle)], 0
    for replicas, share, given_back, is_resumed in steps:
        count = replicas * share
        left = streams[0].num_available(count)
        assert left == min(count, len(expected) - place)
        if left < count:
            with pytest.raises(DataError, match=f"{count} prompts were to be taken, {left} are"):
                streams[0]._copy().take(count)
            break
        # every replica has a stream of its own, and takes its part of the step
        state = json.loads(json.dumps(streams[0].state_dict()))
        streams = [stream_of(table, seed, shuffle) for _ in range(replicas)]
        for stream in streams:
            stream.load_state_dict(state)
        assert [stream.prompts[number].id for number in streams[0].peek(count)] == expected[
            place : place + count
        ]
        shares = [stream.take(count)[rank::replicas] for rank, stream in enumerate(streams)]
        taken = [prompt for column in zip(*shares, strict=True) for prompt in column]
        assert [prompt.id for prompt in taken] == expected[place : place + count]
        assert all(prompt.id.startswith(prompt.source) for prompt in taken)
        place += count
        if is_resumed:
            back = min(given_back, count)
            own = [{p.id: p for p in streams[0].prompts}[p.id] for p in taken[count - back :]]
            state = json.loads(json.dumps(streams[0].state_dict(first=own)))
            streams = [stream_of(table, seed, shuffle)]
            streams[0].load_state_dict(state)
            place -= back


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.booleans(),
)
def test_counts_are_those_of_the_weights_and_every_epoch_has_every_prompt_once(
    sizes, seed, shuffle
):
    table = [(count, float(weight), "repeat") for count, weight in sizes]
    stream, weights = stream_of(table, seed, shuffle), [weight for _, weight in sizes]
    total = sum(weights)
    ids = [prompt.id for prompt in stream.take(8 * total)]
    names = [name.partition(":")[0] for name in ids]
    for rounds in range(1, 9):
        counts = Counter(names[: rounds * total])
        assert [counts[name] for name in NAMES[: len(sizes)]] == [rounds * w for w in weights]
    # between: a source is never a whole draw and a share of the others' rounding away
    for place in range(1, len(ids)):
        for name, weight in zip(NAMES, weights, strict=False):
            share = Fraction(weight, total) * place
            assert abs(names[:place].count(name) - share) < 1 + len(sizes)
    for name, (count, _) in zip(NAMES, sizes, strict=False):
        own = [entry for entry in ids if entry.startswith(name)]
        for epoch in [own[i : i + count] for i in range(0, len(own), count)]:
            assert len(set(epoch)) == len(epoch)
            if len(epoch) == count:
                assert set(epoch) == {f"{name}:{i}" for i in range(count)}


def test_a_source_does_not_always_meet_the_same_replica():
    """Of two sources of one weight each replica of two gets about half of each."""
    sources = [p.source for p in stream_of([(50, 1.0, "repeat")] * 2).take(400)]
    share = sources[::2].count("gsm8k") / 200
    assert 0.35 < share < 0.65
    # without the hash, replica 0 of two has only the first source
    regular = [p.source for p in stream_of([(50, 1.0, "repeat")] * 2, shuffle=False).take(400)]
    assert set(regular[::2]) == {"gsm8k"}


def test_a_dropped_source_leaves_the_others_and_a_stopping_one_ends_the_data():
    table = [(2, 1.0, "drop"), (3, 1.0, "repeat")]
    ids = [p.id for p in stream_of(table, shuffle=False).take(8)]
    assert ids == [
        *("gsm8k:0", "math:0", "gsm8k:1", "math:1", "math:2", "math:0", "math:1", "math:2")
    ]
    table = [(2, 1.0, "stop"), (3, 1.0, "repeat")]
    stream = stream_of(table, shuffle=False)
    assert stream.num_available(100) == 4 and not stream.is_endless
    assert [p.id for p in stream.take(4)] == ["gsm8k:0", "math:0", "gsm8k:1", "math:1"]
    # prompts that are given back count, and are taken again
    stream.load_state_dict(stream.state_dict(first=stream.prompts[:1]))
    assert stream.num_available(100) == 1 and stream.take(1)[0].id == "gsm8k:0"
    assert stream.num_available(100) == 0
    all_dropped = stream_of([(2, 1.0, "drop"), (1, 9.0, "drop")])
    assert all_dropped.num_available(100) == 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_mixture_is_endless_exactly_where_drawing_never_ends(length, monkeypatch):
    """An endless mixture is not drawn to count its prompts, which takes seconds for a long run."""
    for policies in itertools.product(("repeat", "stop", "drop"), repeat=length):
        stream = stream_of([(2 + k, 1.0 + k, policy) for k, policy in enumerate(policies)])
        ahead = stream._copy()
        assert stream.is_endless == all(ahead._next() for _ in range(200)), policies
        if stream.is_endless:
            monkeypatch.setattr(stream, "_copy", None)
            assert stream.num_available(10**9) == 10**9


@pytest.mark.parametrize(
    ("table", "seed", "message"),
    [
        ([(4, 1.0, "repeat")], 3, r"sources \['gsm8k'\], the checkpoint was made with \['gsm8k', "),
        (
            [(4, 2.0, "repeat"), (5, 1.0, "drop")],
            3,
            "source gsm8k: weight = 2.0, the checkpoint was made with 1.0; resume with the same",
        ),
        (
            [(4, 1.0, "repeat"), (5, 1.0, "stop")],
            3,
            "source math: when_used_up = stop, the checkpoint was made with drop",
        ),
        (
            [(4, 1.0, "repeat"), (6, 1.0, "drop")],
            3,
            "source math: data order: num_prompts = 6, the checkpoint was made with 5",
        ),
        ([(4, 1.0, "repeat"), (5, 1.0, "drop")], 4, "source gsm8k: data order: seed = 4"),
    ],
)
def test_another_mixture_is_not_resumed(table, seed, message):
    state = stream_of([(4, 1.0, "repeat"), (5, 1.0, "drop")]).state_dict()
    with pytest.raises(DataError, match=message):
        stream_of(table, seed).load_state_dict(state)


def test_one_file_and_a_mixture_do_not_resume_one_another():
    one, mixed = (
        PromptSource(prompts_of("", 4), seed=3, shuffle=True),
        stream_of([(4, 1.0, "drop")]),
    )
    with pytest.raises(
        DataError, match="data.train is one file, the checkpoint was made with 1 so"
    ):
        one.load_state_dict(mixed.state_dict())
    with pytest.raises(DataError, match="has 1 sources, the checkpoint was made with one file"):
        mixed.load_state_dict(one.state_dict())


def test_metrics_and_place_name_every_source():
    stream = stream_of([(4, 1.0, "repeat"), (10, 1.0, "repeat")], shuffle=False)
    stream.take(12)
    assert stream.metrics() == {"source/gsm8k/epochs": 1.5, "source/math/epochs": 0.6}
    assert stream.place() == (
        "gsm8k: epoch 2 of the data, after 2 of 4 prompts; math: epoch 1 of the data, after 6 of"
        " 10 prompts"
    )
