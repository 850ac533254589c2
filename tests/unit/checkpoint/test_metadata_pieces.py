"""`.metadata` put together from the pieces of ranks is what torch pickles."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.checkpoint.torch_dist.metadata_pieces import beginning, complete, piece


def written(rank: int, count: int) -> list[WriteResult]:
    """Also with names and offsets that a pickle refers to again, and an object."""
    file = f"__{rank}_0.distcp"
    parts = [
        WriteResult(
            MetadataIndex(f"layer.{i % 7}", (i, rank), i), 9, _StorageInfo(file, 10**9 * i, 9)
        )
        for i in range(count)
    ]
    return (
        [*parts, WriteResult(MetadataIndex(f"state.{rank}"), 3, _StorageInfo(file, 0, 3))]
        if count > 1
        else parts
    )


@pytest.mark.parametrize("counts", [[], [0], [1], [3], [1, 0, 300, 2, 2500, 1], [260] * 5])
def test_the_pieces_of_all_ranks_are_one_pickle(tmp_path, counts: list[int]) -> None:
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 4))) for i in range(300)]
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size((300, 4)), chunks
    )
    ranks = [written(rank, count) for rank, count in enumerate(counts)]
    planned = Metadata({"layer.0": tensor, "state.0": BytesStorageMetadata()})
    planned.all_local_plans = ["as core attaches them"]
    content = b"".join(complete(beginning(planned), map(piece, ranks)))
    (tmp_path / ".metadata").write_bytes(content)
    expected = replace(
        planned, storage_data={each.index: each.storage_data for found in ranks for each in found}
    )
    for found in (read_metadata(tmp_path), pickle.loads(content)):  # noqa: S301  (its own bytes)
        assert found == expected and not hasattr(found, "all_local_plans")
        assert list(found.storage_data) == list(expected.storage_data)
