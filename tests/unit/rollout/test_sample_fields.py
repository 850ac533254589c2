"""A field of a sample that has another type than SGLang sends is refused with a reason that names
it.
"""

import numpy as np
import pytest

from megatron_rl.rollout.client.sample_fields import SampleDropped, parse_logprobs, parse_tokens


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
