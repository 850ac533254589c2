"""The dtype that --backend bridge writes: the engine's model in the place of Bridge's functions."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl_tools.convert import bridge_backend
from megatron_rl_tools.convert.bridge_backend import Whole, build_model
from megatron_rl_tools.convert.convert_hf import main
from tests.families import family_checkpoint


@pytest.fixture
def way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Convert a bfloat16 checkpoint to float32 torch_dist and back; return the dtypes of the built
    models and the result's tensors.
    """
    hf = family_checkpoint(tmp_path / "hf", "glm4_moe", dtype=torch.bfloat16)
    megatron, built = tmp_path / "megatron", []
    to_megatron = ["hf-to-megatron", "--hf", str(hf), "--out", str(megatron)]
    assert main([*to_megatron, "--dtype", "float32"]) == 0

    def convert(written: torch.dtype | None = None, *options: str) -> dict[str, torch.Tensor]:
        def make(path: Path, dtype: torch.dtype, parallel: object) -> Whole:
            built.append(dtype)
            values = {name: v.to(written or dtype) for name, v in load_file(source).items()}
            return Whole(
                spec, build_model(hf, spec, dtype, parallel), lambda: None,
                lambda place: save_file(values, place / "model.safetensors"), [1], 1,
            )  # fmt: skip

        monkeypatch.setattr(bridge_backend, "maker", lambda path: make)
        out = tmp_path / "out"
        command = ["megatron-to-hf", "--megatron", str(megatron), "--config", str(hf)]
        assert main([*command, "--out", str(out), "--backend", "bridge", *options]) == 0
        return load_file(out / "model.safetensors")

    spec, source = make_spec(load_hf_config(hf)), hf / "model.safetensors"
    return convert, built


def test_the_way_back_keeps_the_dtype_of_the_megatron_checkpoint(way_back, capsys) -> None:
    """The dtype of --config, here bfloat16, is another."""
    convert, built = way_back
    assert {values.dtype for values in convert().values()} == {torch.float32}
    assert built == [torch.float32] and "WARNING" not in capsys.readouterr().out


def test_the_dtype_of_the_command_line_comes_first(way_back) -> None:
    convert, built = way_back
    convert(None, "--dtype", "float16")
    assert built == [torch.float16]


def test_another_dtype_than_was_asked_is_named(way_back, capsys) -> None:
    convert, _ = way_back
    convert(torch.bfloat16)
    printed = capsys.readouterr().out
    assert "tensors in another dtype than float32, first lm_head.weight (bfloat16)" in printed
