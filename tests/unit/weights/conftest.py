"""Fixtures of the tests of weight syncs."""

import pytest
import torch
from safetensors.torch import save_file

from tests.fake_receiver import receivers


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two processes that receive weights; at first they have a tensor that no test sends."""
    file = tmp_path_factory.mktemp("first") / "model.safetensors"
    save_file({"nothing": torch.zeros(1)}, file)
    with receivers(file, 2) as processes:
        yield processes
