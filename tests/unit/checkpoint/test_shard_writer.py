"""How core is asked to plan and to write a save."""

import json
import queue
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_rl.checkpoint.torch_dist import shard_writer
from megatron_rl.checkpoint.torch_dist.chunk_writer import CONFIG
from megatron_rl.checkpoint.torch_dist.shard_writer import (
    Planner,
    Shards,
    _Strategy,
    on_all_ranks,
    write_common,
)
from megatron_rl.weights.hf.files import load_plain


@pytest.mark.parametrize("how", [(), ("nvrx",)], ids=["directly", "through core's wrapper"])
def test_of_the_ways_of_writing_of_core_0_19_its_own_is_taken(monkeypatch, how):
    """One replica calls the strategy directly: its default is a package that nothing here
    installs.
    """
    monkeypatch.setattr(
        TorchDistSaveShardedStrategy,
        "async_save",
        lambda self, state, folder, async_strategy="nvrx": async_strategy,
    )
    assert _Strategy().async_save({}, "folder", *how) == "mcore"


def test_core_without_ways_of_writing_gets_none(monkeypatch):
    monkeypatch.setattr(
        TorchDistSaveShardedStrategy, "async_save", lambda self, state, folder: (state, folder)
    )
    assert _Strategy().async_save({}, "folder") == ({}, "folder")


def test_core_recognises_the_format_by_two_files(tmp_path):
    """The same ones as those of a conversion."""
    write_common(tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text()) == CONFIG
    assert load_plain(tmp_path / "common.pt") == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["common.pt", "metadata.json"]


@pytest.mark.parametrize("outcome", [["results"], OSError(28, "No space left on device")])
def test_a_file_is_written_by_core_and_synced_and_its_error_is_raised(monkeypatch, outcome):
    calls = []

    def write(transforms, number, bucket, results, started, use_fsync):
        started.get_nowait()  # as core does when it ends
        calls.append((transforms, bucket, use_fsync))
        results.put((number, outcome))

    monkeypatch.setattr(shard_writer.FileSystemWriterAsync, "write_preloaded_data", write)
    shards = Shards(SimpleNamespace(transforms="transforms"), [])
    if isinstance(outcome, OSError):
        with pytest.raises(OSError, match="No space left"):
            shards._write_bucket("bucket")
    else:
        assert shards._write_bucket("bucket") == outcome
    assert calls == [(["transforms"], "bucket", True)]


def test_no_process_for_results_is_started_while_core_plans():
    before = shard_writer.filesystem_async._results_queue
    with pytest.raises(KeyError), shard_writer._without_manager():
        assert isinstance(shard_writer.filesystem_async._results_queue, queue.SimpleQueue)
        raise KeyError
    assert shard_writer.filesystem_async._results_queue is before


@pytest.mark.parametrize("others", [[True, True], [True, False], [False, False]])
def test_a_plan_serves_again_where_it_does_on_every_rank(monkeypatch, others):
    def gather(values, value):
        values[:] = [value, *others]

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert on_all_ranks(True) == all(others) and not on_all_ranks(False)


def test_replicated_tensors_are_spread_where_there_are_several_ranks():
    one, several = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 2)
    assert isinstance(Planner(one)._strategy, _Strategy)
    spread = Planner(several)._strategy
    assert isinstance(spread.base_strategy, _Strategy)
    assert spread.parallelization_group is several and spread.do_cache_distribution
