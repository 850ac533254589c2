"""A run of one rank resumes bit by bit, and damage is refused.

Other layouts: tests/dist/test_checkpoint.py.
"""

import pytest
import torch.distributed as dist

from tests.dist.test_checkpoint import BF16, DISTRIBUTED, case, save_and_resume, spoil_and_load
from tests.tiny import random_checkpoint

CASES = {
    "plain_async": case({}, saving={"async_save": True}),
    "distributed": case({}, optim=DISTRIBUTED),
    "bf16": case({}, model=BF16),
    "before_the_first_update": case({}, optim=DISTRIBUTED, after=0),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The default group of one rank, and a model of two layers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield random_checkpoint(tmp_path_factory.mktemp("one_rank") / "moe", num_hidden_layers=2)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_resume_is_bit_identical(checkpoint, tmp_path, name):
    save_and_resume(checkpoint, tmp_path, {name: CASES[name]})


def test_damage_is_refused(checkpoint, tmp_path):
    refused = spoil_and_load(checkpoint, tmp_path, 15)
    assert sum(refused.values()) >= 12
