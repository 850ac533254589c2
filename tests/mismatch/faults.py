"""Real servers, and faults of their weights and of the trainer's checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.weights.hf.fp8 import dequantize_blocks, quantize_blocks
from tests.families import family_checkpoint
from tests.mismatch.proxy import Edit, hide_all, hide_files, proxy
from tests.tiny import random_checkpoint

Tensors = dict[str, torch.Tensor]
ANSWER_SECONDS = 600.0
"""How long a server may take for an answer, on a machine that does other work."""


@dataclass
class Served:
    """A running server, the checkpoint that it was started with, and a folder for others."""

    url: str
    checkpoint: Path
    folder: Path

    def load(self, checkpoint: Path, *, flush: bool = True) -> None:
        """What a weight sync through the disk does."""
        for _ in range(100 if flush else 0):
            if httpx.post(f"{self.url}/flush_cache", timeout=ANSWER_SECONDS).status_code == 200:
                break
            time.sleep(0.05)
        version = httpx.get(f"{self.url}/model_info", timeout=ANSWER_SECONDS).json()[
            "weight_version"
        ]
        body = {"model_path": str(checkpoint), "flush_cache": False, "weight_version": version}
        answer = httpx.post(
            f"{self.url}/update_weights_from_disk", json=body, timeout=ANSWER_SECONDS
        )
        assert answer.json()["success"], answer.text

    def variant(
        self, name: str, edit: Callable[[Tensors], None] | None = None, **config: Any
    ) -> Path:
        """A copy of the checkpoint with changed tensors or keys of config.json."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.checkpoint, path)
        if edit is not None:
            tensors = load_file(path / "model.safetensors")
            edit(tensors)
            save_file({key: value.contiguous() for key, value in tensors.items()},
            path / "model.safetensors",
                      metadata={"format": "pt"})  # fmt: skip
        if config:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return path


@contextmanager
def serve(kind: str, folder: Path) -> Iterator[Served]:
    """One of SERVERS."""
    make, dtype = SERVERS[kind]
    checkpoint = make(folder / kind)
    rollout = RolloutConfig(dtype=dtype, max_total_tokens=8192, max_running_requests=16,
                            server_args=("--enable-return-hidden-states",))  # fmt: skip
    with launch_server(
        checkpoint, rollout, device="cpu", log_path=folder / f"{kind}.log", seed=0
    ) as server:
        first = {"input_ids": [5, 9, 13], "sampling_params": {"max_new_tokens": 1}}
        # the slowest one
        httpx.post(f"{server.url}/generate", json=first, timeout=ANSWER_SECONDS).raise_for_status()
        yield Served(server.url, checkpoint, folder)


SERVERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen3_moe": (random_checkpoint, "float32"),
    "qwen3_moe_bf16": (lambda path: random_checkpoint(path, dtype=torch.bfloat16), "bfloat16"),
    "glm4_moe": (
        lambda path: family_checkpoint(path, "glm4_moe", head_dim=16, hidden_size=64),
        "float32",
    ),
}


Setup = Callable[[Served], AbstractContextManager[list[str]]]
"""Inside, the fault is there; the options that name server and checkpoint."""

# Faults of weights, on the server -----------------------------------------------------------------


def wrong_tensor(tensors: Tensors) -> None:
    tensor = tensors["model.layers.2.self_attn.o_proj.weight"]
    tensor.copy_(
        torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * tensor.std()
    )


def swapped_experts(tensors: Tensors) -> None:
    for part in ("gate", "up", "down"):
        a, b = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in (2, 5))
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()


def rounded_routers(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor.copy_(tensor.bfloat16())


def quantised_experts(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.copy_(dequantize_blocks(*quantize_blocks(tensor)))


def one_quantised_expert(tensors: Tensors) -> None:
    for part in ("gate", "up", "down"):
        tensor = tensors[f"model.layers.3.mlp.experts.6.{part}_proj.weight"]
        tensor.copy_(dequantize_blocks(*quantize_blocks(tensor)))


def swapped_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
        other = name.replace("layers.1.", "layers.2.")
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()


def tied_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def query_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.q_norm.weight"].mul_(1.1)


def older(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(2)
    for tensor in tensors.values():
        tensor.add_(
            0.02 * tensor.std().nan_to_num(1.0) * torch.randn(tensor.shape, generator=generator)
            + 1e-4
        )


def other_seed(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if "norm" not in name:
            tensor.copy_(tensor.std() * torch.randn(tensor.shape, generator=generator))


def no_bias(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()


def loaded(
    edit: Callable[[Tensors], None], *, is_kept: bool = False, is_blind: bool = False
) -> Setup:
    """The server loads the wrong weights.  is_kept: their folder stays, as with another checkpoint;
    is_blind: no checksums and no files, as from a GPU on another machine."""

    @contextmanager
    def setup(served: Served) -> Iterator[list[str]]:
        path = served.variant("wrong", edit)
        served.load(path)
        if not is_kept:
            shutil.rmtree(path)
        try:
            with ExitStack() as stack:
                url = stack.enter_context(proxy(served.url, hide_all)) if is_blind else served.url
                yield ["--url", url, "--model", str(served.checkpoint)]
        finally:
            served.load(served.checkpoint)

    return setup


# Settings, in the trainer's checkpoint ------------------------------------------------------------


def trainer_config(*, is_hidden: bool = False, **config: Any) -> Setup:
    """is_hidden: the server's files cannot be read, as on another machine: trials must find it."""

    @contextmanager
    def setup(served: Served) -> Iterator[list[str]]:
        path = served.variant("trainer", **config)
        with ExitStack() as stack:
            url = served.url
            if is_hidden:
                url = stack.enter_context(proxy(url, on_answer=hide_files))
            yield ["--url", url, "--model", str(path)]

    return setup


def rope(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def edited(
    on_answer: Edit = lambda path, answer: None,
    on_request: Edit = lambda path, body: None,
    options: tuple[str, ...] = (),
) -> Setup:
    @contextmanager
    def setup(served: Served) -> Iterator[list[str]]:
        with proxy(served.url, on_answer, on_request) as url:
            yield ["--url", url, "--model", str(served.checkpoint), *options]

    return setup
