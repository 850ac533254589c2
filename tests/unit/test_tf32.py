"""float32 stays float32 on a GPU: TF32 is off before CUDA starts, in a run and in verify_replay."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.trainer import build
from megatron_rl_tools.verify_replay import verify_replay
from tests.tiny import random_checkpoint


@pytest.fixture(autouse=True)
def container(monkeypatch):
    """Variables and flags as NGC containers and torch set them."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = True
    yield
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


def is_exact() -> bool:
    flags = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return flags == (False, False) and os.environ["NVIDIA_TF32_OVERRIDE"] == "0"


@pytest.mark.parametrize(("dtype", "expected"), [("float32", True), ("bfloat16", False)])
def test_a_run_in_float32_turns_tf32_off_before_it_starts_cuda(dtype, expected, monkeypatch):
    found = []

    def make_parallel(*_, **__):
        found.append(is_exact())
        raise InterruptedError("this test needs no more")

    monkeypatch.setattr(build, "make_parallel", make_parallel)
    monkeypatch.setattr(build, "load_tokenizer", lambda path: None)
    files = {("data.train", ""): SimpleNamespace(prompts=[], line=str)}
    monkeypatch.setattr(build, "load_prompt_files", lambda *_: files)
    stream = SimpleNamespace(num_available=lambda needed: needed)
    monkeypatch.setattr(build, "make_stream", lambda *_, **__: stream)
    cfg = load_config(None, [], {"model": {"path": "x", "dtype": dtype}, "data": {"train": "x"}})
    with pytest.raises(InterruptedError), build.start_trainer(cfg):
        pass
    assert found == [expected]


def test_verify_replay_turns_tf32_off_before_it_starts_cuda(monkeypatch, capsys):
    found = []

    def make_parallel(*_, **__):
        found.append(is_exact())
        raise ValueError("this test needs no more")

    monkeypatch.setattr(verify_replay, "make_parallel", make_parallel)
    assert verify_replay.main(["--device", "cuda"]) == 2
    assert found == [True], capsys.readouterr().err


def test_verify_replay_computes_a_transformer_engine_recipe_with_local_layers(tmp_path):
    model = random_checkpoint(tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{model}"\nlayer_spec = "transformer_engine"\n[data]\ntrain = "x"\n'
    )
    args = verify_replay.parse(["--model", str(recipe)])
    with ExitStack() as stack:
        cfg, _ = verify_replay.proof_config(args, verify_replay.parallel_sizes(args), None, stack)
    assert (cfg.model.dtype, cfg.model.layer_spec) == ("float32", "local")
