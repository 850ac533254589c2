"""Which tensors of an HF checkpoint directory count."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.files import (
    CheckpointError,
    HFFiles,
    companions,
    is_finite,
    is_left_out,
    num_tensors,
    outline,
    read_headers,
)
from megatron_rl.weights.sync.pushed_weights import expected_tensors
from tests.plain_checkpoint import DENSE


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
    others = ["model.layers", "model.layers.shared.weight", "model.layers.-1.weight"]
    assert not any(is_left_out(name, has) for name in others)


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


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_pickles_of_every_name_are_refused(tmp_path, name):
    torch.save(TENSORS, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"only pickle weights .{name}., which can run code"):
        read_headers(tmp_path)


class Planted:
    """Touches `marker` where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_trusted_pickles_run_no_code(tmp_path):
    torch.save({"a": Planted(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="alone: Unsupported ") as caught:
        HFFiles(tmp_path, trust_pickle=True)
    assert "use `torch" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_tensors_are_counted_where_there_are_safetensors_files(tmp_path):
    assert num_tensors(tmp_path) == 0
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert num_tensors(tmp_path) == 3


def test_companions_are_the_files_without_weights(tmp_path):
    weights = ("a.safetensors", "a.bin", "a.pt", "a.pth", "a.gguf", "a.safetensors.index.json")
    for name in (*weights, ".hidden", "tokenizer.model", "config.json"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert [file.name for file in companions(tmp_path)] == ["config.json", "tokenizer.model"]


def test_every_tensor_that_does_not_fit_the_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    spec = make_spec(load_hf_config(tmp_path))
    tensors = {name: torch.zeros(shape) for entry in entries(spec) for name, shape in entry.hf}
    save_file(tensors, tmp_path / "model.safetensors")
    with HFFiles(tmp_path) as files:
        files.check(spec)
    del tensors["model.norm.weight"]
    tensors |= {"extra": torch.zeros(1), "lm_head.weight": torch.zeros(2, 3)}
    tensors["model.embed_tokens.weight"] = torch.zeros(64, 64, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with HFFiles(tmp_path) as files, pytest.raises(CheckpointError) as caught:
        files.check(spec)
    assert str(caught.value) == (
        f"{tmp_path}: tensor model.norm.weight is missing; tensor extra is not part of the model;"
        " tensor lm_head.weight [2, 3], not [64, 64] has another shape than config.json means;"
        " tensor model.embed_tokens.weight I32 is not f32, bf16, f16; does config.json belong to"
        " this checkpoint?"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": 5}'])
def test_a_damaged_index_is_named(tmp_path, text):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: no index of"):
        read_headers(tmp_path)
