"""Files of an HF checkpoint: of the size asked for, over all ranks of a machine."""

import json
import stat
import tempfile
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import HFTensor
from megatron_rl.weights.hf.files import CheckpointError
from megatron_rl.weights.hf.write import write_hf_checkpoint


@pytest.mark.parametrize(("local_ranks", "files"), [(None, 2), ("1", 2), ("4", 8)])
def test_ranks_of_a_machine_share_the_bytes_of_a_file(local_ranks, files, tmp_path, monkeypatch):
    """Each may hold one in host memory."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    tensors = {f"layers.{index}": torch.full((25,), float(index)) for index in range(8)}
    stream = (HFTensor(name, (25,), torch.float32, 0, tensor) for name, tensor in tensors.items())
    (tmp_path / "source").mkdir()
    write_hf_checkpoint(stream, tmp_path / "source", tmp_path / "out", Ranks(), max_shard_bytes=400)
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(written) == files
    found = {name: tensor for file in written for name, tensor in load_file(file).items()}
    assert sorted(found) == sorted(tensors) and all(
        torch.equal(found[name], tensors[name]) for name in tensors
    )


def test_a_small_checkpoint_is_one_file_in_the_format_of_transformers(tmp_path):
    """transformers refuses a file without a format."""
    (tmp_path / "source").mkdir()
    stream = [HFTensor(name, (2,), torch.float32, 0, torch.ones(2)) for name in ("b", "a")]
    write_hf_checkpoint(stream, tmp_path / "source", tmp_path / "runs/1/out", Ranks())
    (file,) = (tmp_path / "runs/1/out").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"} and set(opened.keys()) == {"a", "b"}
    text = (file.parent / "model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert index == {"metadata": {"total_size": 16}, "weight_map": {"a": file.name, "b": file.name}}
    assert text == json.dumps(index, indent=2) + "\n", "as transformers writes it"


def stream(*names):
    return [HFTensor(name, (2,), torch.float32, 0, torch.ones(2)) for name in names]


def test_a_checkpoint_replaces_an_older_one_as_a_whole(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "runs/out"
    source.mkdir()
    (source / "config.json").write_text("{}")
    out.mkdir(parents=True)
    (out / "older.txt").touch()
    # a folder elsewhere might be on another file system, from which none can be renamed
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    write_hf_checkpoint(stream("a"), source, out, Ranks())
    names = ["config.json", "model-00001.safetensors", "model.safetensors.index.json"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert (out / "config.json").read_text() == "{}" and list(out.parent.iterdir()) == [out]
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o644}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
            {"torch_dtype": "float32", "dtype": "float32"},
        ),
        ({"dtype": None, "hidden_size": 2}, {"dtype": "float32", "hidden_size": 2}),
        ({"hidden_size": 2}, {"hidden_size": 2}),
    ],
)
def test_config_json_gets_the_dtype_of_the_tensors(tmp_path, config, expected):
    """Loaders round to the dtype that it names."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    write_hf_checkpoint(stream("a", "b"), tmp_path / "source", tmp_path / "out", Ranks())
    assert json.loads((tmp_path / "out/config.json").read_text()) == expected


def test_other_names_than_the_source_has_are_refused_and_nothing_is_replaced(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"b": torch.ones(2), "c": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="names differ from the weights there, first a$"):
        write_hf_checkpoint(stream("a", "b", "c", "d"), source, out, Ranks())
    assert list(tmp_path.iterdir()) == [source]


def test_tensors_leave_the_device_one_by_one(tmp_path):
    moved = []

    def on_device(name):
        def cpu():
            moved.append(name)
            return torch.ones(2)

        return HFTensor(name, (2,), torch.float32, 0, SimpleNamespace(cpu=cpu))

    tensors = (on_device(name) for name in "ab")
    (tmp_path / "source").mkdir()
    write_hf_checkpoint(tensors, tmp_path / "source", tmp_path / "out", Ranks())
    assert moved == ["a", "b"]
