"""Files of an HF checkpoint: of the size asked for, over all ranks of a machine."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import HFTensor
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
