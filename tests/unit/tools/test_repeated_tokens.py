"""Responses that repeat tokens, and dumps that lost tokens: neither may be taken for the other."""

import numpy as np
import pytest

from megatron_rl_tools.check_rollouts.check_rollouts import check_dump, main
from megatron_rl_tools.check_rollouts.formats import open_dump
from megatron_rl_tools.check_rollouts.rollout_canary import Compared, wrong_part
from tests.unit.tools.test_foreign_dumps import PROMPT, RESPONSE, make_sequences, save_samples


def checks_of(folder):
    return {finding.check for finding in check_dump(open_dump(folder, None, None)).findings}


def test_a_response_of_one_token_is_not_shifted(tmp_path):
    """Rows of one token share experts equally at every shift."""
    sequences = []
    for index, (tokens, logprobs, mask, routes) in enumerate(make_sequences()):
        tokens[PROMPT:], mask[:] = 5, 1
        rows = np.random.default_rng(index).permutation(16)[:4]
        changed = np.random.default_rng(index).random(len(routes)) < 0.3
        routes[PROMPT:, 1:] = [3, 4, 5, 6]
        routes[changed, 1:] = rows
        sequences.append((tokens, logprobs - 0.01, mask, routes))
    assert "alignment" not in checks_of(save_samples(tmp_path / "same", sequences=sequences))


def test_rows_of_a_repeated_token_are_no_fault_of_the_canary_and_a_shift_is():
    """A row at the edge that differs must not make a neighbouring shift the better one."""
    live = np.tile(np.array([[[0, 1]]]), (40, 3, 1))
    recorded = live.copy()
    recorded[0, 0] = recorded[39, 2] = [2, 3]
    assert wrong_part(Compared("a", 0, recorded, live)) is None
    distinct = np.random.default_rng(0).random((40, 3, 16)).argsort(-1)[..., :12]
    late = np.concatenate([distinct[:1], distinct[:-1]])
    assert wrong_part(Compared("b", 0, distinct, distinct)) is None
    assert wrong_part(Compared("b", 0, late, distinct)) is not None


@pytest.mark.parametrize("kept", [PROMPT + RESPONSE - 20, RESPONSE])
def test_a_dump_with_fewer_tokens_than_its_response_is_named(tmp_path, kept):
    def cut(samples):
        for sample in samples:
            sample["tokens"] = sample["tokens"][:kept]
            sample["response_length"] = RESPONSE
            sample["rollout_routed_experts"] = sample["rollout_routed_experts"][: kept - 1]

    folder = save_samples(tmp_path / "cut", change=cut)
    assert "length" in checks_of(folder) and main([str(folder)]) == 1


def test_bytes_that_were_read_as_other_ids_are_named(tmp_path):
    def garble(samples):
        for sample in samples:
            sample["rollout_routed_experts"] = sample["rollout_routed_experts"] + 252_642_571

    assert "range" in checks_of(save_samples(tmp_path / "ids", change=garble))


def test_the_canary_needs_rollouts(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--sample", "0"])
    assert "--sample 0: must be at least 1" in capsys.readouterr().err
