"""How core is asked to plan a save."""

import pytest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_rl.checkpoint.writer import _Strategy


@pytest.mark.parametrize("how", [(), ("nvrx",)], ids=["directly", "through core's wrapper"])
def test_of_the_ways_of_writing_of_core_0_19_its_own_is_taken(monkeypatch, how):
    """One replica calls the strategy directly: its default is a package that nothing here installs."""
    monkeypatch.setattr(
        TorchDistSaveShardedStrategy, "async_save", lambda self, state, folder, async_strategy="nvrx": async_strategy
    )
    assert _Strategy().async_save({}, "folder", *how) == "mcore"


def test_core_without_ways_of_writing_gets_none(monkeypatch):
    monkeypatch.setattr(TorchDistSaveShardedStrategy, "async_save", lambda self, state, folder: (state, folder))
    assert _Strategy().async_save({}, "folder") == ({}, "folder")
