"""Bytes of a weight sync that sends adapters alone (computed), and what servers add to the
training-inference discrepancy by them (measured on a tiny model on the CPU):

    python -m benchmarks.lora_sync

The trainer multiplies by W' = W + s B A, rounded once; a server with slots computes W x + s B (A x)
with roundings of its own.  mu is that of a real SGLang server, which samples; pi is that of
transformers with W' and the server's experts, in the same precision.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from megatron_rl.config import Config, load_config
from megatron_rl.models.known import find_spec
from megatron_rl.plan.adapter_sizes import sent_parameters
from megatron_rl.plan.hardware import GIB
from megatron_rl.plan.memory import full_model
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.adapter_slots import max_age, slot_options
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.weights.hf.peft_folder import ROOT
from megatron_rl.weights.sync.adapter_push import AdapterPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from tests.e2e.reference import TINY_SPEC
from tests.one_rank import given
from tests.referee import forced, rollout_routes
from tests.tiny import random_checkpoint

MODELS, RANKS = ("qwen3-30b-a3b", "qwen3-235b-a22b"), (8, 16, 64)
RANK, SIZE, SERVED = 8, 0.05, 2
"""Rank of the tiny model's adapters, norm of s B A over that of W, and bytes of a bfloat16."""
PROMPTS, GROUP, TOKENS = 8, 8, 64


def settings(path: str | Path, rank: int, dtype: str = "bfloat16", **rollout: object) -> Config:
    sections = {
        "run": {"device": "cpu"},
        "model": {"path": str(path), "dtype": dtype},
        "data": {"train": "unused"},
        "lora": {"rank": rank, "alpha": 2.0 * rank, "targets": ["attention"]},
        "rollout": {"dtype": dtype, "max_total_tokens": 16384, **rollout},
    }
    return load_config(None, [], sections)


def print_bytes() -> None:
    print("| model | rank | adapters, MiB | all weights, GiB | share |")
    print("|---|---|---|---|---|")
    for model in MODELS:
        spec = find_spec(model)
        whole = SERVED * full_model(spec).total
        for rank in RANKS:
            size = SERVED * sent_parameters(spec, settings(model, rank).lora)
            print(
                f"| {model} | {rank} | {size / 2**20:.1f} | {whole / GIB:.1f} |"
                f" {100 * size / whole:.3f} % |"
            )


def make_adapters(weights: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Random A and B of the attention, by PEFT's names, in the weights' dtype."""
    torch.manual_seed(1)
    tensors = {}
    for name, weight in weights.items():
        if "self_attn" in name and name.endswith("_proj.weight"):
            rows, columns = weight.shape
            a, b = torch.randn(RANK, columns), torch.randn(rows, RANK)
            b *= SIZE * weight.float().norm() / (scale * b @ a).norm()
            module = ROOT + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = a.to(weight.dtype)
            tensors[f"{module}.lora_B.weight"] = b.to(weight.dtype)
    return tensors


def merge(base: Path, folder: Path, adapters: dict[str, torch.Tensor], scale: float) -> Path:
    """Write the checkpoint of W', each computed in float32 and rounded once."""
    merged = load_file(base / "model.safetensors")
    for name, weight in merged.items():
        module = ROOT + name.removesuffix(".weight")
        if (a := adapters.get(f"{module}.lora_A.weight")) is not None:
            b = adapters[f"{module}.lora_B.weight"]
            merged[name] = (weight.float() + scale * b.float() @ a.float()).to(weight.dtype)
    folder.mkdir()
    save_file(merged, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


def sample(cfg: Config, adapters: dict[str, torch.Tensor] | None) -> list[Rollout]:
    """Return what a new server samples from cfg.model.path, with these adapters in a slot."""
    options = () if adapters is None else slot_options(cfg, "cpu")
    rollout = cfg.rollout.model_copy(update={"server_args": options})
    log_path = cfg.model.path.parent / "server.log"
    prompts = [Prompt(f"q{i}", "", (5, 9, 13, 40, 7, 8 + i), "") for i in range(PROMPTS)]
    with launch_server(cfg.model.path, rollout, device="cpu", log_path=log_path, seed=0) as server:
        run = "" if adapters is None else "lora"
        if adapters is not None:
            pusher = AdapterPusher(
                ServerAccess([server.url], 60.0),
                PushedWeights(cfg.model.path, getattr(torch, cfg.model.dtype)),
                cfg.lora,
                device=torch.device("cpu"),
                max_age=max_age(cfg),
                verifies=True,
                run=run,
            )
            pusher.push(lambda: given(adapters), 0)
        rules = SampleRules(TINY_SPEC, want_routes=True, by_adapter=adapters is not None)
        client = RolloutClient([server.url], rollout, rules, run=run)
        groups = client.generate(
            prompts, GROUP, policy_version=0, temperature=1.0, max_tokens=TOKENS, stop_token_ids=()
        )
    return [rollout for group in groups for rollout in group.rollouts]


@torch.no_grad()
def differences(merged: Path, dtype: str, rollouts: list[Rollout]) -> np.ndarray:
    """Return |log mu - log pi| of all sampled tokens."""
    model = Qwen3MoeForCausalLM.from_pretrained(merged, dtype=getattr(torch, dtype)).eval()
    values = []
    for rollout in rollouts:
        with forced(model, rollout_routes(rollout)):
            logits = model(torch.from_numpy(rollout.tokens)[None]).logits[0].float()
        sampled = torch.from_numpy(rollout.sampled)
        logprobs = logits.log_softmax(-1)[sampled - 1, torch.from_numpy(rollout.tokens)[sampled]]
        values.append(np.abs(rollout.rollout_logprobs - logprobs.numpy()))
    return np.concatenate(values)


def print_discrepancy(folder: Path) -> None:
    print("| precision | servers have | tokens | mean | 99 % | largest |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        base = random_checkpoint(
            folder / f"base_{dtype}", dtype=getattr(torch, dtype), eos_token_id=None
        )
        cfg = settings(base, RANK, dtype, weight_sync="adapter")
        adapters = make_adapters(load_file(base / "model.safetensors"), cfg.lora.scale)
        merged = merge(base, folder / f"merged_{dtype}", adapters, cfg.lora.scale)
        for what, rollouts in (
            ("merged weights", sample(settings(merged, RANK, dtype), None)),
            ("base and adapter", sample(cfg, adapters)),
        ):
            found = differences(merged, dtype, rollouts)
            print(
                f"| {dtype} | {what} | {len(found):,} | {found.mean():.1e} |"
                f" {np.quantile(found, 0.99):.1e} | {found.max():.1e} |"
            )


def main() -> None:
    print("A weight sync of attention adapters in bfloat16, computed:\n")
    print_bytes()
    print(
        f"\nDifference of log mu and log pi, nats per token: rank {RANK}, scale 2, the"
        f" norm of s B A is {SIZE} of that of W, experts replayed, measured:\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        print_discrepancy(Path(folder))


if __name__ == "__main__":
    main()
