"""Which requests are cut for their age when the weights change, and what fields of an answer may
be empty.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.rollout.client.call import Call, Request
from megatron_rl.rollout.client.response import SampleDropped
from megatron_rl.rollout.client.response_json import parse_in_pieces
from megatron_rl.rollout.client.sample_fields import parse_mask
from megatron_rl.rollout.client.sampling import Sampling

MASK, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"


def request(version: int, **prefixes: int) -> Request:
    """A request for the responses 0 and 1 of a group; prefixes: rN, the oldest version of the part
    of response N that is known."""
    known = {
        int(name[1:]): SimpleNamespace(oldest_version=oldest) for name, oldest in prefixes.items()
    }
    group = SimpleNamespace(prefixes=known)
    return Request("r", None, group, Sampling(1.0, 8, (), version), [0, 1])


@pytest.mark.parametrize(
    ("prefixes", "oldest"),
    [({}, 5), ({"r0": 3}, 3), ({"r0": 4, "r1": 2}, 2), ({"r2": 1}, 5)],
)
def test_a_request_is_as_old_as_its_oldest_prefix(prefixes, oldest):
    assert request(5, **prefixes).oldest_version == oldest


def test_a_request_of_the_oldest_version_that_is_allowed_continues():
    old, allowed, new = request(1), request(2), request(3)
    cut = []
    call = SimpleNamespace(
        sampling=Sampling(1.0, 8, (), 3),
        in_flight={"a": old, "b": allowed, "c": new},
        cut=lambda request, reason: cut.append((request, reason)),
        tasks={},
        counters=None,
    )
    assert Call.renew(call, SimpleNamespace(version=4, oldest=2, groups=[])) == []
    assert cut == [(old, "age")] and call.sampling.policy_version == 4


def test_one_entry_that_is_no_set():
    with pytest.raises(SampleDropped, match="expected a list of ids for each token"):
        parse_mask({MASK: [[3], 3], LOGPROBS: [0.0, 0.0]}, "r", np.array([3, 3]), 64)


def test_a_long_value_that_is_an_empty_text():
    parsed = parse_in_pieces(b'{"routed_experts": "", "x": "y"}')
    assert parsed["x"] == "y" and bytes(parsed["routed_experts"]) == b""
