"""Rules about the size of a step, checked once the number of replicas is known."""

import pytest

from megatron_rl.config import load_config


def check(dp_size, run, parallel):
    from megatron_rl.models.fit import check_step

    sections = {"model": {"path": "x"}, "data": {"train": "x"}, "run": run, "parallel": parallel}
    check_step(load_config(None, [], sections), dp_size)


def test_replicas_get_whole_mini_batches():
    check(2, {"prompts_per_step": 8, "num_mini_batches": 4}, {})
    with pytest.raises(ValueError, match=r"prompts_per_step = 8 must be a multiple of 16 = data-parallel size 4"):
        check(4, {"prompts_per_step": 8, "num_mini_batches": 4}, {})


def test_interleaved_stages_need_a_multiple_of_pp_responses():
    """Micro-batches come in multiples of pp, and none is empty."""
    interleaved = {"pp": 4, "vp": 2}
    check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 2}, interleaved)
    with pytest.raises(ValueError, match=r"6 responses per mini-batch.*multiple of parallel\.pp = 4"):
        check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 3}, interleaved)
    check(1, {"prompts_per_step": 4, "num_mini_batches": 2, "group_size": 3}, {"pp": 4})
