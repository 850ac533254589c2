"""Kept sets on their way: requested and read by the client, joined over turns and cuts, saved,
sent, packed, checked.
"""

from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_rl.batch.codec import (
    arrays_in_file,
    check_origin,
    file_arrays,
    from_arrays,
    from_bytes,
    header_of,
    to_bytes,
)
from megatron_rl.batch.pack import Sample, pack
from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.records import Prompt
from megatron_rl.records.row_sets import sets_of_tokens
from megatron_rl.records.token_sets import TokenSets, join_masks
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.request import GenerateRequest
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.sample_fields import SampleDropped
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout
from megatron_rl_tools.check_rollouts.dumped import Dumped
from megatron_rl_tools.check_rollouts.rollout_checks import check_one
from tests.fake_server import FakeServer
from tests.faults.samples import SPEC, VERSION, honest_sample
from tests.unit.batch.rollouts import make_rollout
from tests.unit.rollout.parts import join_turns
from tests.unit.test_token_sets import make_mask

PROMPT = Prompt(id="q1", text="", token_ids=(3, 4, 5), label="")
TRUNCATION = Truncation(0.9, 20, 0.05)
SAMPLING = Sampling(1.0, 8, (1,), VERSION, truncation=TRUNCATION)


def masked_sample(body, prompt, sample_id):
    """An honest sample as SGLang answers return_sampling_mask: sets with the token, log-probs over
    them.
    """
    sample = honest_sample(body, prompt, sample_id)
    tokens = np.array(sample["output_ids"])
    _, sets = make_mask(np.random.default_rng(tokens.tolist()), tokens)
    sample["meta_info"]["output_token_sampling_mask"] = [own.tolist() for own in sets]
    sample["meta_info"]["output_token_sampling_logprobs"] = [-float(len(own)) for own in sets]
    return sample


def with_mask(rollout, seed=0):
    mask, _ = make_mask(np.random.default_rng(seed), rollout.tokens[rollout.sampled])
    return replace(rollout, sampling_mask=mask)


def test_a_request_asks_for_the_sets_and_a_response_has_them():
    with FakeServer("ok", source=masked_sample) as server:
        client = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        group = Group(PROMPT, 3)
        client.fill([group], SAMPLING)
        client.fill([Group(PROMPT, 1)], replace(SAMPLING, truncation=None))
        client.fill([Group(replace(PROMPT, token_ids=(3,) * 600), 3)], SAMPLING)
    first, plain, _ = server.requests
    params = first["sampling_params"]
    assert first["return_sampling_mask"] is True and "return_sampling_mask" not in plain
    assert (params["top_p"], params["top_k"], params["min_p"]) == TRUNCATION
    assert plain["sampling_params"]["top_k"] == -1
    (prefill,) = server.prefills
    assert "return_sampling_mask" not in prefill, "a prefill samples nothing"
    for rollout, sample in zip(
        group.rollout_group().rollouts, server.served.values(), strict=False
    ):
        meta = sample["meta_info"]
        sets = [sorted(own) for own in meta["output_token_sampling_mask"]]
        mask = rollout.sampling_mask
        assert [own.tolist() for own in np.split(mask.ids(), np.cumsum(mask.sizes)[:-1])] == sets
        assert rollout.rollout_logprobs.tolist() == [-float(len(own)) for own in sets]
    plain_bytes, bytes_ = (
        GenerateRequest("r", PROMPT, [()], sampling, True, False).max_body_bytes(SPEC)
        for sampling in (replace(SAMPLING, truncation=None), SAMPLING)
    )
    assert bytes_ - plain_bytes >= 11 * 20 * 8, "20 ids of a token"


def edit(name, change):
    def fault(meta):
        meta[name] = change(meta[name])

    return fault


SETS, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
FAULTS = {
    "no sets": (lambda meta: meta.pop(SETS), "no output_token_sampling_mask"),
    "a set too few": (edit(SETS, lambda sets: sets[1:]), "4 kept sets for 5 sampled tokens"),
    "shifted by a token": (edit(SETS, lambda sets: sets[1:] + sets[:1]), "not in its kept set"),
    "an empty set": (edit(SETS, lambda sets: [[], *sets[1:]]), "sets of 0 to"),
    "an id twice": (edit(SETS, lambda sets: [sets[0] * 2, *sets[1:]]), "once in a set"),
    "an id outside": (
        edit(SETS, lambda sets: [[*sets[0], 64], *sets[1:]]),
        "ids up to 64, vocabulary of 64",
    ),
    "not ids": (edit(SETS, lambda sets: [[True], *sets[1:]]), "expected a list of int"),
    "not lists": (
        edit(SETS, lambda sets: [3] * len(sets)),
        "expected a list of ids for each token",
    ),
    "a log-prob too few": (
        edit(LOGPROBS, lambda values: values[1:]),
        "4 log-probs over kept sets for 5",
    ),
    "no log-probs": (
        lambda meta: meta.pop(LOGPROBS),
        "output_token_sampling_logprobs: expected a list",
    ),
    "a log-prob above 0": (edit(LOGPROBS, lambda values: [0.5, *values[1:]]), "is above 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_sets_that_do_not_belong_to_the_tokens_are_refused(name):
    fault, found = FAULTS[name]
    sample = masked_sample({"return_routed_experts": False}, [3, 4, 5], "s0")
    expected = ExpectedSample(PROMPT, "q1/0")
    sampling, rules = replace(SAMPLING, max_tokens=8), SampleRules(SPEC, want_routes=False)
    assert len(parse_sample(sample, expected, sampling, rules).sampling_mask) == 5
    fault(sample["meta_info"])
    with pytest.raises(SampleDropped, match=found) as caught:
        parse_sample(sample, expected, sampling, rules)
    assert caught.value.reason in ("bad_mask", "bad_logprobs")


def test_a_sample_of_an_evaluation_needs_no_sets():
    sample = honest_sample({"return_routed_experts": False}, [3, 4, 5], "s0")
    expected, rules = ExpectedSample(PROMPT, "q1/0"), SampleRules(SPEC, want_routes=False)
    rollout = parse_sample(sample, expected, replace(SAMPLING, return_sets=False), rules)
    assert rollout.sampling_mask is None and rollout.response_length
    with pytest.raises(SampleDropped):
        parse_sample(sample, expected, SAMPLING, rules)


def test_a_server_without_sets_is_named_after_the_retries():
    with FakeServer("ok") as server:
        client = RolloutClient(
            [server.url], RolloutConfig(max_retries=0), SampleRules(SPEC, want_routes=False)
        )
        with pytest.raises(RolloutError, match="bad_mask: no output_token_sampling_mask.*0.5.16"):
            client.fill([Group(PROMPT, 1)], SAMPLING)
    assert client.counters.dropped["bad_mask"] == 1


def test_turns_and_continuations_join_their_sets():
    first = with_mask(make_rollout("r", 3, 4, routes=False))
    size = len(first.tokens) + 2  # the environment writes 2 tokens
    tokens = np.concatenate([first.tokens, [8, 9], np.arange(1, 6)])
    more = replace(
        with_mask(make_rollout("r", size, 5, routes=False), 1),
        tokens=tokens,
        policy_versions=np.full(5, 2, np.int32),
    )
    more = with_mask(more, 1)
    joined = join_turns(first, more)
    assert (
        joined.environment == ((7, 9),) and len(joined.sampling_mask) == 9 == joined.response_length
    )
    expected = join_masks([first.sampling_mask, more.sampling_mask])
    assert np.array_equal(joined.sampling_mask.ids(), expected.ids())
    assert check_origin(joined) is joined
    for parts in (
        (replace(first, sampling_mask=None), more),
        (first, replace(more, sampling_mask=None)),
    ):
        with pytest.raises(
            ValueError, match="rollout r: kept sets of only one of prefix and continuation"
        ):
            join_turns(*parts)


def test_sets_survive_bytes_and_files(tmp_path):
    rollouts = [with_mask(make_rollout(f"r{n}", 3, n)) for n in (1, 4, 7)]
    received, _ = from_bytes(to_bytes(rollouts))
    save_file(file_arrays("r4", rollouts[1]), tmp_path / "file")
    with safe_open(tmp_path / "file", framework="numpy") as file:
        arrays = arrays_in_file(file, set(file.keys()), "r4")
        saved = from_arrays(header_of(rollouts[1]), arrays)
        with pytest.raises(ValueError, match="rollout r4: half of its kept sets is missing"):
            from_arrays(
                header_of(rollouts[1]), lambda kind: None if kind == "mask_codes" else arrays(kind)
            )
    for rollout, found in [*zip(rollouts, received, strict=True), (rollouts[1], saved)]:
        assert (
            found.sampling_mask.sizes.dtype == np.uint16
            and found.sampling_mask.codes.dtype == np.uint8
        )
        assert np.array_equal(found.sampling_mask.ids(), rollout.sampling_mask.ids())
        assert check_origin(found) is found
    other = replace(
        received[1],
        sampling_mask=with_mask(rollouts[1], 5).sampling_mask,
        tokens=rollouts[1].tokens + 1,
    )
    with pytest.raises(ValueError, match="rollout r4"):
        check_origin(replace(other, routed_experts=None))


def test_packed_rows_have_the_sets_of_what_they_predict():
    rollouts = [with_mask(make_rollout(f"r{n}", 3, n), n) for n in (4, 2, 6)]
    agent = replace(rollouts[2], environment=((5, 7),),
    rollout_logprobs=rollouts[2].rollout_logprobs[:4],
                    policy_versions=rollouts[2].policy_versions[:4], routes_digest=None,
                    sampling_mask=None)  # fmt: skip
    rollouts[2] = with_mask(agent)
    batch = pack([Sample(rollout, 1.0) for rollout in rollouts], [8, 8, 10, 3])
    kept = sets_of_tokens(batch.sampling_masks, batch.set_index.numpy())
    assert np.array_equal(~kept.is_empty.numpy(), batch.loss_mask.numpy())
    for row in range(batch.num_tokens):
        own = kept.ids[int(kept.offsets[row]) : int(kept.offsets[row + 1])].tolist()
        assert (int(batch.labels[row]) in own) == bool(batch.loss_mask[row])
    assert pack([Sample(make_rollout("r", 2, 3), 1.0)]).set_index is None
    with pytest.raises(ValueError, match=r"rollouts \['r4'\] have no kept sets but others"):
        pack([Sample(replace(rollouts[0], sampling_mask=None), 1.0), Sample(rollouts[1], 1.0)])
    with pytest.raises(ValueError, match="rollout r4: sampled token 0 of 4 is"):
        swapped = TokenSets.of(np.ones(4, int), rollouts[0].tokens[3:][::-1].copy())
        pack([Sample(replace(rollouts[0], sampling_mask=swapped), 1.0)])


@pytest.mark.parametrize("fault", ["none", "half", "shift", "vocabulary"])
def test_check_rollouts_names_sets_of_other_tokens(fault):
    rollout = with_mask(make_rollout("r", 3, 6, routes=False))
    mask = rollout.sampling_mask
    wide = np.full(6, 2, np.uint16)
    outside = TokenSets.of(wide, np.stack([rollout.tokens[3:], np.full(6, 99)], 1).ravel())
    given = {
        "none": (mask.sizes, mask.codes),
        "half": (mask.sizes, None),
        "shift": (np.roll(mask.sizes, 1), mask.codes),
        "vocabulary": (wide, outside.codes),
    }[fault]
    record = RecordedRollout(1, "r", "p", "", "", "", 0.0, 0.0, 3, 6, "stop", [[0, 6]])
    dumped = Dumped(record, rollout.tokens, rollout.rollout_logprobs, None, mask=given)
    found = list(check_one(dumped, SPEC))
    assert [finding.check for finding in found] == ([] if fault == "none" else ["mask"])
    expected = {
        "half": "codes are missing",
        "shift": "kept set",
        "vocabulary": "kept id 99, must be below the vocabulary 64",
    }
    assert fault == "none" or expected[fault] in found[0].found
