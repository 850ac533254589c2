"""A field of a sample that has another type than SGLang sends is refused with a reason that names
it.
"""

import numpy as np
import pytest

from megatron_rl.rollout.client.counters import num_tokens
from megatron_rl.rollout.client.response import after_retraction, sends_all_rows
from megatron_rl.rollout.client.sample_fields import (
    SampleDropped,
    parse_logprobs,
    parse_spans,
    parse_tokens,
    parse_versions,
)
from tests.faults.samples import SPEC


@pytest.mark.parametrize("ids", [[3, True], [3.0], ["3"], {"3": 4}, None])
def test_response_ids_are_a_list_of_integers(ids):
    with pytest.raises(SampleDropped, match="^bad_tokens: output_ids: expected a list of int$"):
        parse_tokens({"output_ids": ids}, {}, 64, 8)


@pytest.mark.parametrize("entry", [[-0.5], [], "ab", {0: -0.5, 1: 3}, -0.5])
def test_a_logprob_comes_with_its_token(entry):
    entries = [[-0.25, 3, None], entry]
    with pytest.raises(SampleDropped, match=r"^bad_logprobs: .* a list of \[log-prob, id, text\]$"):
        parse_logprobs({"output_token_logprobs": entries}, np.array([3, 3]))


@pytest.mark.parametrize("entry", [[-0.5, 3.0, None], [-0.5, True, None], [-0.5, None, None]])
def test_the_token_of_a_logprob_is_an_integer(entry):
    expected = "^bad_logprobs: output_token_logprobs: expected a list of int$"
    with pytest.raises(SampleDropped, match=expected):
        parse_logprobs({"output_token_logprobs": [entry]}, np.array([3]))


@pytest.mark.parametrize("span", [["version"], "version", {}, {"end": 2}])
def test_a_span_of_versions_names_its_version(span):
    spans = [{"version": "3", "end": 1}, span]
    with pytest.raises(SampleDropped, match="^malformed: weight_versions = "):
        parse_spans({"weight_versions": spans}, 3, 4)


@pytest.mark.parametrize("ends", [(None, 3), ("1", 3), (1.0, 3), (True, 3), (0, 3), (3, 3), (1, 2)])
def test_spans_of_versions_follow_one_another_to_the_last_token(ends):
    with pytest.raises(SampleDropped, match="^malformed: weight_versions of 3 tokens: "):
        parse_versions([(3, ends[0]), (4, ends[1])], 3)
    assert parse_versions([(3, 1), (4, 3)], 3).tolist() == [3, 4, 4]


def test_a_sample_without_routes_has_not_sent_those_that_were_known():
    assert not sends_all_rows({"meta_info": {}}, 5, SPEC)


def test_a_retraction_leaves_no_row_of_the_request():
    ids, missing = after_retraction({"num_retractions": 1}, np.ones((4, 3, 2), int), None)
    assert missing.all() and not ids.any() and ids.shape == (4, 3, 2)


@pytest.mark.parametrize("sample", [{}, {"output_ids": None}, {"output_ids": 3}, None])
def test_a_sample_without_a_list_of_ids_has_no_tokens(sample):
    assert num_tokens(sample) == 0
