"""Copies of a save on the host: as large as the state, and freed when it is written."""

import pytest
import torch

from megatron_rl.checkpoint.torch_dist.shard_writer import Shards, address


class OnGPU:
    """A tensor of a GPU: with non_blocking torch copies it to pinned memory, rounded up and never
    given back.
    """

    def to(self, device, *, copy=False, non_blocking=False):
        assert device == "cpu" and not non_blocking
        return "copy"


def test_copies_of_the_gpu_are_not_pinned():
    shards = Shards(None, [(None, "file", ([], [("item", OnGPU())]))])
    shards.stage(copy=False)
    assert shards.buckets == [(None, "file", ([], [("item", "copy")]))]


@pytest.mark.parametrize("copy", [False, True])
def test_on_the_host_only_what_training_changes_is_copied(copy):
    live, view = torch.zeros(4), torch.ones(4)
    shards = Shards(None, [("folder", "file", (["object"], [("a", live[1:]), ("b", view)]))])
    shards.live = frozenset({address(live)})
    shards.stage(copy=copy)
    ((path, name, (objects, tensors)),) = shards.buckets
    assert (path, name, objects, shards.names) == ("folder", "file", ["object"], ["file"])
    assert [item for item, _ in tensors] == ["a", "b"]
    assert shards.num_bytes == 7 * 4
    live += 7
    assert tensors[0][1].tolist() == ([0.0] * 3 if copy else [7.0] * 3)
    assert address(tensors[1][1]) == address(view)
