"""Files of an HF checkpoint: of the size asked for, over all ranks of a machine."""

import pytest
import torch
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
    assert sorted(found) == sorted(tensors) and all(torch.equal(found[name], tensors[name]) for name in tensors)
