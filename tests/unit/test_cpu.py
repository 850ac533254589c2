"""Every replacement of distributed/cpu.py is used by megatron-core in a training step: a row it no
longer needs fails here.
"""

import functools
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import build, run_ranks
from tests.tiny import random_checkpoint

METHODS = ("Stream.wait_stream", "Stream.record_event", "Event.synchronize", "Event.wait")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="replacements are for machines without CUDA"
)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Counter:
    path = random_checkpoint(
        tmp_path_factory.mktemp("tied"), num_hidden_layers=2, tie_word_embeddings=True
    )
    return sum(run_ranks(count_uses, 2, path), Counter())


def count_uses(path: Path) -> Counter:
    """Run training steps in three layouts and count, per replacement, the calls that come from
    megatron-core's own code.
    """
    from megatron_rl.distributed import cpu

    counts: Counter = Counter()

    def from_core(depth: int) -> bool:
        return sys._getframe(depth).f_globals["__name__"].startswith("megatron.core")

    def counting(name: str, replacement: Any) -> Any:
        @functools.wraps(replacement, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += from_core(2)
            return replacement(*args, **kwargs)

        return call

    for patch in cpu.PATCHES:
        setattr(
            cpu._owner(patch.module),
            patch.name,
            counting(f"{patch.module}.{patch.name}", patch.replacement),
        )
    for name in METHODS:
        owner, method = getattr(cpu, name.split(".")[0]), name.split(".")[1]
        setattr(owner, method, counting(name, getattr(owner, method)))

    def counting_factory(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts["factories"] += str(kwargs.get("device")).startswith("cuda") and from_core(2)
            return make(*args, **kwargs)

        return call

    for name in cpu.FACTORIES:
        setattr(torch, name, counting_factory(getattr(torch, name)))
    train_step(path, pp=2)
    train_step(path, tp=2, ep=2, etp=1)
    train_step(path, cp=2)
    train_step(path, offload=True)
    return counts


def train_step(path: Path, *, offload: bool = False, **layout: int) -> None:
    """offload: half of Adam's state, for which core needs bfloat16 weights."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, _, config, parallel = build(
        path,
        dtype="bfloat16" if offload else "float32",
        model={"recompute": "full"},
        **layout,
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            bf16=offload,
            optimizer_cpu_offload=offload,
            optimizer_offload_fraction=0.5,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    tokens = torch.arange(32)[None] % 60
    positions = torch.arange(32)[None]

    def forward_step(iterator: Any, chunk: Any) -> tuple:
        output = chunk(tokens, positions, None, labels=tokens)
        return output, lambda out: (
            out.sum(),
            torch.tensor(out.numel()),
            {"loss": out.detach().sum()},
        )

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=None, model=wrapped, num_microbatches=2,
        seq_length=32,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    finite, norm, _ = optimizer.step()
    assert finite and norm > 0
    parallel.destroy()


def patch_names() -> list[str]:
    from megatron_rl.distributed import cpu

    return [f"{patch.module}.{patch.name}" for patch in cpu.PATCHES]


@pytest.mark.parametrize("name", [*patch_names(), *METHODS, "factories"])
def test_megatron_core_needs_this_replacement(used: Counter, name: str) -> None:
    assert used[name] > 0, (
        f"megatron-core no longer uses {name} in training: remove its row from distributed/cpu.py"
    )


def test_install_twice_changes_nothing() -> None:
    from megatron_rl.distributed import cpu

    before = torch.cuda.Stream, torch.Tensor.type
    cpu.install_cpu()
    assert (torch.cuda.Stream, torch.Tensor.type) == before
    for tensor in (
        torch.zeros(2, device="cuda:0"),
        torch.tensor(2, device="cuda"),
        torch.arange(3, device=torch.device("cuda")),
    ):
        assert tensor.device == torch.device("cpu")
    with torch.device("meta"):  # as transformers builds models
        assert {
            torch.zeros(2).device,
            torch.arange(3).device,
            torch.nn.Linear(2, 2).weight.device,
        } == {torch.device("meta")}
        assert torch.zeros(2, device="cuda").device == torch.device("cpu")
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type(torch.int64).dtype is torch.int64
    assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"


def test_no_effect_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.distributed import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_is_installed", lambda: False)
    monkeypatch.setattr(cpu, "PATCHES", (cpu.Patch("os", "getcwd", None, "must not be applied"),))
    cpu.install_cpu()
    assert os.getcwd()
