"""Files of megatron-core's format: what their metadata may hold, and the names of what differs."""

import pickle
from collections import OrderedDict
from pathlib import PosixPath, PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_rl.checkpoint.torch_dist.chunk_reader import check_keys, shown_parameters
from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.weights.hf.files import CheckpointError


def test_all_that_core_puts_into_metadata_is_read(tmp_path):
    """core's own saves hold the plans of all ranks, and where they were saved."""
    shape = torch.Size((2, 3))
    index, chunk = (
        MetadataIndex("a", torch.Size((0, 0)), 0),
        ChunkStorageMetadata(torch.Size((0, 0)), shape),
    )
    properties = TensorProperties(dtype=torch.bfloat16)
    item = WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, shape)
    )
    metadata = Metadata(
        {"a": TensorStorageMetadata(properties, shape, [chunk]), "b": BytesStorageMetadata()},
        planner_data=OrderedDict(a=("a",)),
        storage_data={index: _StorageInfo("__0_0.distcp", 0, 9)},
        storage_meta=StorageMeta(PosixPath("run"), modules=[PurePosixPath("run")]),
    )
    metadata.all_local_plans = [SavePlan([item], _StoragePrefix("__0_"))]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = read_metadata(tmp_path)
    assert loaded == metadata and loaded.all_local_plans == metadata.all_local_plans
    assert (loaded.planner_data, loaded.storage_meta) == (
        metadata.planner_data,
        metadata.storage_meta,
    )


@pytest.mark.parametrize("value", [{"a": 1}, OrderedDict, print])
def test_what_is_no_metadata_is_refused(tmp_path, value):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(
        CheckpointError,
        match=r"/\.metadata: (holds no checkpoint metadata|cannot be read: it names builtins)",
    ):
        read_metadata(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"none: not a torch_dist checkpoint \(no \.metadata\)"
    ):
        read_metadata(tmp_path / "none")


def test_names_are_shown_once_for_all_layers_and_the_first_four():
    layers = [f"decoder.layers.{number}.mlp" for number in range(9)]
    assert shown_parameters(layers) == "decoder.layers.N.mlp" and shown_parameters([]) == "none"
    assert (
        shown_parameters("dcba") == "a, b, c, d"
        and shown_parameters("fedcba") == "a, b, c, d and 2 more"
    )


def test_tensors_that_differ_are_named_with_what_may_be_the_cause():
    check_keys("here", ["a"], ["a", "optimizer.a"])  # no optimizer is wanted
    text = (
        "here: has other tensors than this model; only in the model: {}; only in the checkpoint:"
        " {}; {}"
    )
    model = "model.path (config.json) must be that of the checkpoint"
    optimizer = (
        "optim.distributed or model.dtype differs from that of the run that saved it; set both as"
        " there"
    )
    core = (
        "; else the other version of megatron-core is the cause: with that one run megatron-rl"
        " convert megatron-to-hf"
    )
    for wanted, stored, other_core, expected in [
        ("ab", "bc", False, text.format("a", "c", model)),
        ("ab", "b", True, text.format("a", "none", model + core)),
        (
            ["optimizer.a"],
            ["optimizer.b"],
            False,
            text.format("optimizer.a", "optimizer.b", optimizer),
        ),
        (["optimizer.a", "b"], ["optimizer.a"], False, text.format("b", "none", model)),
    ]:
        with pytest.raises(CheckpointError) as caught:
            check_keys("here", wanted, stored, other_core=other_core)
        assert str(caught.value) == expected
