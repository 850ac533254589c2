"""Which tensors of an HF checkpoint directory count."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.weights.hf.files import (
    CheckpointError,
    HFFiles,
    is_finite,
    is_left_out,
    outline,
    read_headers,
)
from megatron_rl.weights.sync.pushed_weights import expected_tensors


def test_layers_of_multi_token_prediction_are_left_out_under_every_name(tmp_path):
    """Qwen3-Next's config.json does not count its own, and names them apart from the decoder's
    layers.
    """
    ours = ["model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"]
    theirs = ["mtp.fc.weight", "model.mtp.layers.0.eh_proj.weight", "model.layers.2.eh_proj.weight"]
    save_file({name: torch.ones(2, 3) for name in ours + theirs}, tmp_path / "model.safetensors")
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sorted(expected_tensors(tmp_path, torch.float32)) == ours
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    has = outline(tmp_path)
    assert [is_left_out(name, has) for name in theirs] == [True, True, False]


def test_of_a_tensor_in_two_files_the_index_names_one_or_it_is_refused(tmp_path):
    """As where a model was saved over another one that had more files."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / first)
    save_file({"b": torch.ones(2), "c": torch.ones(2)}, tmp_path / second)
    with pytest.raises(
        CheckpointError, match=f"tensor b is in two files, {first} and {second}; remove"
    ):
        read_headers(tmp_path)
    for file in (first, second):
        index = {"weight_map": {"a": first, "b": file, "c": second}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert {name: header.file.name for name, header in read_headers(tmp_path).items()} == index[
            "weight_map"
        ]
        with HFFiles(tmp_path) as files:
            assert files.read("b").tolist() == [float(file == second)] * 2


TENSORS = {
    "scalar": torch.tensor(2.5),
    "matrix": torch.arange(12.0).view(4, 3).bfloat16(),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_a_tensor_is_read_as_it_is_stored(tmp_path, kind):
    """Pickles only where the caller trusts them."""
    if kind == "pickle":
        torch.save(TENSORS, tmp_path / "pytorch_model.bin")
        text = (
            r"only pickle weights \(pytorch_model\.bin\), which can run code; convert them to"
            r" safetensors files first$"
        )
        with pytest.raises(CheckpointError, match=text):
            HFFiles(tmp_path)
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    with HFFiles(tmp_path, trust_pickle=kind == "pickle") as files:
        for name, tensor in TENSORS.items():
            stored = files.read(name)
            assert (
                stored.dtype == tensor.dtype
                and stored.shape == tensor.shape
                and stored.equal(tensor)
            )
        assert files.read_rows("matrix", 1, 3).equal(TENSORS["matrix"][1:3])
        assert files.read_rows("scalar", 0, 1).tolist() == [2.5]


def test_one_value_that_is_not_finite_is_seen():
    for value in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.ones(3, 4)
        assert is_finite(tensor) and is_finite(tensor[:0])
        tensor[1, 2] = value
        assert not is_finite(tensor)
