"""Loading a checkpoint must not run code from it: a pickle planted into any of its files is refused
and not run.
"""

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.checkpoint.manifest import MANIFEST, digest_files, manifest_text, read_manifest
from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.rollout.group_files import find_groups
from megatron_rl.weights.hf import files as hf_files
from tests.dist.engines import make_engine
from tests.tiny import random_checkpoint


class Planted:
    """Touches `marker` where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A Checkpointer of one rank with a checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("planted")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = make_engine(random_checkpoint(folder / "moe", num_hidden_layers=1))
    checkpointer = Checkpointer(engine, folder / "checkpoints")
    checkpointer.save(Snapshot(1, {}))
    yield checkpointer
    engine.parallel.destroy()
    dist.destroy_process_group()


@pytest.fixture
def path(writer):
    """That checkpoint; its files are restored afterwards."""
    folder = writer.folder / "step_000001"
    content = {file: file.read_bytes() for file in folder.iterdir()}
    yield folder
    for file in set(folder.iterdir()) - set(content):
        file.unlink()
    for file, data in content.items():
        file.write_bytes(data)


def saved(value) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def sign(path: Path) -> None:
    """Write a matching manifest, as an attacker who can write there would."""
    manifest = read_manifest(path)
    names = [file.name for file in path.iterdir() if file.name != MANIFEST]
    (path / MANIFEST).write_text(manifest_text(digest_files(path, names), manifest.facts))


def refused(load, marker: Path, message: str) -> None:
    with pytest.raises((CheckpointError, hf_files.CheckpointError, ValueError), match=message):
        load()
    assert not marker.exists(), "the planted pickle was run"


def metadata(path, marker):
    return pickle.dumps(Planted(marker))


def inside_metadata(path, marker):
    content = read_metadata(path)
    content.planner_data = Planted(marker)
    return pickle.dumps(content)


def common(path, marker):
    return saved({"iteration": Planted(marker)})


def rng(path, marker):
    return pickle.dumps(Planted(marker))


FILES = {
    "metadata": (
        ".metadata",
        metadata,
        r"\.metadata: cannot be read: it names .*, which checkpoint metadata does not need",
    ),
    "in metadata": (".metadata", inside_metadata, r"\.metadata: cannot be read: it names"),
    "common": ("common.pt", common, r"common\.pt: not a file of tensors and plain values alone"),
    "rng": ("rng_00000.safetensors", rng, r"rng_00000\.safetensors: not a safetensors file"),
    "state": ("state.json", rng, r"state\.json: not JSON"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_pickle_in_a_file_is_not_run_by_a_resume(writer, path, tmp_path, kind):
    name, content, message = FILES[kind]
    (path / name).write_bytes(content(path, tmp_path / "marker"))
    sign(path)
    refused(lambda: writer.load(path), tmp_path / "marker", message)


def test_the_checkpoint_itself_loads(writer, path):
    sign(path)
    assert writer.load(path).step == 1


def test_a_pickle_in_the_place_of_a_tensor_is_not_run(writer, path, tmp_path):
    content = read_metadata(path)
    index, place = next(item for item in content.storage_data.items() if item[0].offset is not None)
    data = saved(Planted(tmp_path / "marker"))
    with (path / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(data)
        file.write(data)
    (path / ".metadata").write_bytes(pickle.dumps(content))
    sign(path)
    message = rf"{place.relative_path}: {index.fqn} cannot be read: Unsupported global"
    refused(lambda: writer.load(path), tmp_path / "marker", message)


@pytest.mark.parametrize("state", ["planted", "bytes", "empty"])
def test_a_pickle_in_the_place_of_an_extra_state_is_not_run(writer, tmp_path, state):
    """An object, and a tensor of bytes that TransformerEngine would unpickle."""
    from megatron_rl.checkpoint.torch_dist.chunk_writer import write_metadata

    write_metadata(tmp_path, [], ["layer._extra_state/shard_0_1"])
    marker = tmp_path / "marker"
    planted = {
        "planted": Planted(marker),
        "bytes": torch.frombuffer(bytearray(pickle.dumps(Planted(marker))), dtype=torch.uint8),
        "empty": torch.empty(0, dtype=torch.uint8),
    }
    data = saved([planted[state]])
    content = read_metadata(tmp_path)
    (place,) = content.storage_data.values()
    (tmp_path / place.relative_path).write_bytes(data)
    place.length = len(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    requested = ShardedObject("layer._extra_state", None, (1,), (0,))
    checkpoint = SafeCheckpoint(tmp_path)
    if state == "empty":
        assert checkpoint.load({"state": requested})["state"].numel() == 0
        return
    why = {
        "planted": "has more than tensors and plain values: Unsupported",
        "bytes": "extra state that is not empty",
    }[state]
    refused(lambda: checkpoint.load({"state": requested}), marker, why)


@pytest.mark.parametrize("name", ["../outside.distcp", "/dev/zero", "folder/file"])
def test_a_tensor_is_not_read_from_elsewhere(writer, path, name):
    content = read_metadata(path)
    for place in content.storage_data.values():
        place.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(content))
    sign(path)
    with pytest.raises(
        CheckpointError, match=r"\.metadata: .* is stored in .*, must be a file of this folder"
    ):
        writer.load(path)


def test_metadata_that_is_replaced_after_it_was_read_is_not_read_again(writer, path, tmp_path):
    from megatron_rl.checkpoint.state import sharded_state

    checkpoint = SafeCheckpoint(path)
    for name, content in ((".metadata", metadata), ("common.pt", common)):
        (path / name).write_bytes(content(path, tmp_path / "marker"))
    assert checkpoint.load(sharded_state(writer.engine))
    assert not (tmp_path / "marker").exists()


def test_rollouts_in_flight_and_weights_of_huggingface(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "rollouts_00000.safetensors").write_bytes(pickle.dumps(Planted(marker)))
    refused(
        lambda: find_groups(tmp_path),
        marker,
        r"rollouts_00000\.safetensors: not a file of rollouts in flight",
    )
    (tmp_path / "hf").mkdir()
    file = tmp_path / "hf/pytorch_model.bin"
    file.write_bytes(saved({"weight": Planted(marker)}))
    refused(
        lambda: hf_files.HFFiles(file.parent), marker, r"only pickle weights \(pytorch_model\.bin\)"
    )
    refused(
        lambda: hf_files.HFFiles(file.parent, trust_pickle=True),
        marker,
        r"pytorch_model\.bin: not a file of tensors",
    )
    file.rename(file.parent / "model.safetensors")
    refused(lambda: hf_files.HFFiles(file.parent), marker, r"model\.safetensors")
