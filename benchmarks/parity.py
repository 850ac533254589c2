"""Difference between trainer and server with equal weights, by precision, model size, depth and
prompt length.

    OMP_NUM_THREADS=1 python benchmarks/parity.py [--models NAME ...] [--servers bfloat16 ...] \
[--json FILE]

For each model, random weights are written as an HF checkpoint and served by a real SGLang server in
each precision. megatron-core, in each precision, sends its weights with the project's weight sync.
Sampled responses are then compared by the project's parity check (megatron_rl/engine/parity.py).
The limits of that check come from these figures.

Weights: each matrix N(0, 1 / its inputs); matrices that add to the residual stream are divided by
the square root of the number of layers; embedding N(0, 1/4); norms 1.  So the stream stays near 1
at every depth.  The output head is scaled until a token's entropy is about --entropy nats.
`trained` is the demo's model (tools/megatron_rl_tools/make_tiny_moe.py), with its own prompts only.

A row is a model, a pair of precisions and a prompt length.  Wrong models follow, with the shortest
prompts: the trainer or the server's answer is changed as named (tests/wrong_models.py), and the
same rollouts are compared again.
fp8: bf16 servers that hold weights rounded to block-scaled e4m3 (rollout.quantize = fp8).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parity_report import Row, cells, report
from megatron_rl.config import Config, load_config
from megatron_rl.distributed import Parallel, make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.parity import ParityReport, compare
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.ports import free_port
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from megatron_rl_tools.make_tiny_moe import make_tiny_moe
from tests.wrong_models import wrong_models

SHARED = {
    "vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "rope_theta": 1e6, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Model:
    """Sizes of a random Qwen3 or Qwen3-MoE."""

    layers: int
    hidden: int
    ffn: int
    experts: tuple[int, int, int] | None = None
    """(experts, top-k, width of an expert); None for Qwen3."""
    more: dict[str, Any] | None = None
    """Keys of config.json that differ from SHARED."""

    def config(self) -> Qwen3Config | Qwen3MoeConfig:
        sizes = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
        }
        settings = SHARED | (self.more or {}) | sizes
        if self.experts is None:
            return Qwen3Config(**settings)
        number, top_k, width = self.experts
        return Qwen3MoeConfig(
            **settings,
            num_experts=number,
            num_experts_per_tok=top_k,
            moe_intermediate_size=width,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )


MODELS: dict[str, Model | None] = {
    "trained": None,
    "dense-4": Model(4, 128, 384, more=SMALL),
    "dense-16": Model(16, 512, 1536),
    "dense-48": Model(48, 512, 1536),
    "moe-4": Model(4, 128, 384, (8, 2, 64), SMALL),
    "moe-16": Model(16, 512, 1536, (32, 4, 96)),
    "moe-48": Model(48, 256, 768, (128, 8, 40)),
}
LENGTHS = {16: (8, 4, 32), 256: (2, 4, 32), 2000: (1, 4, 32)}
"""Prompt tokens -> prompts, samples of each, response tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--servers", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--trainers", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--entropy", type=float, default=1.5, help="nats of a token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-wrong", action="store_true", help="compare equal weights only")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    parser.add_argument(
        "--json", type=Path, help="append every comparison to this file, one a line"
    )
    parser.add_argument(
        "--report", type=Path, help="measure nothing: the tables of what --json has written"
    )
    args = parser.parse_args()
    if args.report:
        print(report([Row(**json.loads(line)) for line in args.report.read_text().splitlines()]))
        return 0
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    one_rank_environment()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            path = make_checkpoint(name, args.folder or Path(scratch), args.seed, args.entropy)
            for row in measure_model(name, path, Path(scratch), args):
                rows.append(row)
                print(cells(row), flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            gc.collect()
    print("\n" + report(rows))
    return 0


def one_rank_environment() -> None:
    """Set the variables that torchrun sets, for this process alone."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(free_port()))


# Checkpoints --------------------------------------------------------------------------------------


def make_checkpoint(name: str, folder: Path, seed: int, entropy: float) -> Path:
    """Write a float32 checkpoint in `folder`, unless it exists."""
    path, model = folder / f"{name}-{seed}", MODELS[name]
    if model is None:
        return make_tiny_moe(path, seed=seed, quiet=True)
    if (path / "model.safetensors").exists():
        return path
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(model.config(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() > 1:
                adds = any(word in parameter_name for word in ("o_proj", "down_proj"))
                parameter.normal_(
                    0.0, (parameter.shape[-1] * (model.layers if adds else 1)) ** -0.5
                )
    scale_head(made, entropy)
    made.save_pretrained(path)
    return path


@torch.no_grad()
def scale_head(model: Any, entropy: float) -> None:
    """Multiply the output head so that the mean entropy of a token after random ones is about
    `entropy` nats.
    """
    vocabulary = model.config.vocab_size
    ids = torch.randint(2, vocabulary, (4, 32))
    logits = model(ids).logits[:, 8:]
    low, high = 0.01, 100.0
    for _ in range(30):
        scale = math.sqrt(low * high)
        mean = torch.distributions.Categorical(logits=logits * scale).entropy().mean().item()
        low, high = (scale, high) if mean > entropy else (low, scale)
    model.lm_head.weight.mul_(scale)


# Measured -----------------------------------------------------------------------------------------


def measure_model(name: str, path: Path, scratch: Path, args: argparse.Namespace) -> Iterator[Row]:
    parallel = make_parallel(
        configuration(path, "float32", "float32").parallel, device="cpu", timeout_minutes=30
    )
    try:
        for server_dtype in args.servers:
            cfg = configuration(path, "float32", server_dtype)
            log = scratch / f"{name}-{server_dtype}.log"
            with launch_server(
                path, cfg.rollout, device="cpu", log_path=log, seed=0, want_routes=cfg.needs_routes
            ) as server:
                yield from measure_server(
                    name, path, server.url, server_dtype, parallel, scratch, args
                )
    finally:
        parallel.destroy()


def measure_server(
    name: str,
    path: Path,
    url: str,
    dtype: str,
    parallel: Parallel,
    scratch: Path,
    args: argparse.Namespace,
) -> Iterator[Row]:
    """Compare every trainer with this server, after it has sent its weights."""
    version = 0
    for trainer in args.trainers:
        cfg = configuration(path, trainer, dtype)
        engine = Engine(cfg, parallel, total_updates=1)
        spec = engine.spec
        client = RolloutClient([url], cfg.rollout, SampleRules(spec, cfg.needs_routes))
        for quantize in (None, cfg.rollout.quantize_keep) if dtype == "bfloat16" else (None,):
            version += 1
            with weight_pusher(url, path, dtype, scratch, quantize) as pusher:
                pusher.push(partial(engine.export_parts, 1), version)
            inference = SimpleNamespace(client=client, version=version)
            pair = SimpleNamespace(trainer=trainer, server="fp8" if quantize else dtype)
            yield from measure_pair(name, path, engine, cfg, inference, pair, args)
        del engine
        gc.collect()


def measure_pair(
    name: str,
    path: Path,
    engine: Engine,
    cfg: Config,
    inference: Any,
    pair: Any,
    args: argparse.Namespace,
) -> Iterator[Row]:
    parameters = (
        sum(tensor.numel() for chunk in engine.chunks for tensor in chunk.parameters()) / 1e6
    )
    groups: dict[int, list[RolloutGroup]] = {}
    for length in args.lengths if MODELS[name] is not None else args.lengths[:1]:
        groups[length] = sample(name, path, inference, engine.spec, length, args.seed)

    def row(length: int, wrong: str, report_of: ParityReport) -> Row:
        sizes = (round(parameters, 2), engine.spec.num_layers)
        return Row(name, *sizes, pair.trainer, pair.server, length, wrong, **vars(report_of))

    for length, sampled in groups.items():
        yield row(length, "", compare(engine, sampled, cfg))
    if args.skip_wrong:
        return
    shortest = min(groups)
    for wrong, report_of in wrong_models(engine, groups[shortest], cfg):
        yield row(shortest, wrong, report_of)


def sample(
    name: str, path: Path, inference: Any, spec: Any, length: int, seed: int
) -> list[RolloutGroup]:
    count, samples, tokens = LENGTHS[length]
    rng = np.random.default_rng([seed, length])
    if MODELS[name] is None:
        rows = [
            json.loads(line)["prompt"]
            for line in (path / "train.jsonl").read_text().splitlines()[:count]
        ]
        vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
        prompts = [
            Prompt(f"p{i}", text, tuple(vocabulary[char] for char in text), "")
            for i, text in enumerate(rows)
        ]
    else:
        ids = rng.integers(2, spec.vocab_size, (count, length))
        prompts = [Prompt(f"p{i}", "", tuple(row.tolist()), "") for i, row in enumerate(ids)]
    stop = () if MODELS[name] is not None else (AutoConfig.from_pretrained(path).eos_token_id,)
    groups = inference.client.generate(
        prompts,
        samples,
        temperature=1.0,
        max_tokens=tokens,
        stop_token_ids=stop,
        policy_version=inference.version,
    )
    return [replace(group, rewards=np.zeros(len(group.rollouts), np.float32)) for group in groups]


def configuration(path: Path, trainer: str, server: str) -> Config:
    sections = {
        "model": {"path": str(path), "dtype": trainer},
        "data": {"train": "unused"},
        "run": {"max_tokens_per_micro_batch": 2048, "device": "cpu"},
        "optim": {"distributed": False},
        "rollout": {
            "dtype": server, "request_timeout_seconds": 1800.0, "max_retries": 0,
            "max_total_tokens": 10240, "max_running_requests": 32, "start_timeout_seconds": 600.0,
            "idle_timeout_seconds": 1800.0, "weight_sync_timeout_seconds": 1800.0,
        },
        "replay": {"mode": "none", "measure": bool(make_spec(load_hf_config(path)).moe_layers)},
    }  # fmt: skip
    return load_config(None, [], sections)


@contextmanager
def weight_pusher(
    url: str, path: Path, dtype: str, scratch: Path, fp8_keep: Sequence[str] | None
) -> Iterator[WeightPusher]:
    pusher = WeightPusher(
        ServerAccess([url], 1800.0),
        PushedWeights(path, getattr(torch, dtype), fp8_keep=fp8_keep),
        TransportSettings(
            "distributed", bucket_mb=64, device=torch.device("cpu"), disk_dir=scratch / "weights"
        ),
    )
    try:
        yield pusher
    finally:
        pusher.close()


if __name__ == "__main__":
    start = time.monotonic()
    status = main()
    print(f"{time.monotonic() - start:.0f} s")
    raise SystemExit(status)
