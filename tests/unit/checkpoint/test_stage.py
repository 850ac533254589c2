"""Copies of a save on the host: as large as the state, and freed when it is written."""

from megatron_rl.checkpoint.writer import Shards


class OnGPU:
    """A tensor of a GPU: with non_blocking torch copies it to pinned memory, rounded up and never given back."""

    def to(self, device, *, copy=False, non_blocking=False):
        assert device == "cpu" and not non_blocking
        return "copy"


def test_copies_of_the_gpu_are_not_pinned():
    shards = Shards(None, [(None, "file", ([], [("item", OnGPU())]))])
    shards.stage(copy=False)
    assert shards.buckets == [(None, "file", ([], [("item", "copy")]))]
