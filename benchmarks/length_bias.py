"""Measured: which responses a small KV cache retracts, and how dropping them changes the lengths
that are trained on.

    OMP_NUM_THREADS=1 python benchmarks/length_bias.py [--responses 1120] [--tokens 1500] [--dtype \
bfloat16]
    python benchmarks/length_bias.py --simulate      # other causes of sampling again; no server

A real SGLang server on the CPU serves a tiny random Qwen3-MoE whose responses end at a nearly
constant rate.  Its KV cache has --tokens tokens, for --running requests.  SGLang admits a request
when 4,096 tokens are free for it, or max_new_tokens where that is less; here, with responses of 64
tokens on average, when 16 are free.  The same prompts are sampled twice: by the client, which keeps
a retracted response, and by a client that refuses it and samples it again.  Then the rows of the
kept responses are compared with transformers' forward in the same precision, and with the same
server's prefill of the complete sequence, which is what it computes after a retraction.

--simulate draws lognormal lengths and applies one event to a step in progress: a server that dies,
a deadline, a signal.
Shapes: S tokens of a sequence, P of them prompt, L layers, K top-k.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sample_fields import SampleDropped
from megatron_rl.rollout.server.process import launch_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.tiny import random_checkpoint  # the tests' checkpoint

SPEC = ModelSizes(num_layers=4, moe_layers=(0, 1, 2, 3), top_k=2, num_experts=8, vocab_size=64)
MAX_TOKENS, GROUP, LONG = 200, 16, 150
CLIP = 16  # tokens that SGLang keeps free for a request that it admits
BINS = (0, 20, 40, 60, 100, 150, MAX_TOKENS + 1)


class Counting(RolloutClient):
    """Notes how often each returned response was retracted; `drops`: refuses those that were, as
    unusable.
    """

    drops = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.retractions: dict[str, int] = {}

    def _parse(self, sample: Any, *args: Any) -> Rollout:
        rollout = super()._parse(sample, *args)
        times = sample["meta_info"]["num_retractions"]
        if times and self.drops:
            raise SampleDropped("retracted", f"{times} times")
        self.retractions[rollout.id] = times
        return rollout


def sample(
    url: str, cfg: RolloutConfig, num_responses: int, *, drops: bool
) -> tuple[list[Rollout], Counting]:
    client = Counting([url], cfg, spec=SPEC, want_routes=True)
    client.drops = drops
    prompts = [
        Prompt(f"q{i}", "", (5, 9, 2 + i % 60, 40, 7, 22, 3 + i // 60, 8), "")
        for i in range(num_responses // GROUP)
    ]
    groups = client.generate(
        prompts,
        GROUP,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        stop_token_ids=(1,),
        policy_version=0,
    )
    return [rollout for group in groups for rollout in group.rollouts], client


def lengths_line(name: str, rollouts: list[Rollout], client: Counting) -> str:
    lengths = np.array([rollout.response_length for rollout in rollouts])
    error = lengths.std(ddof=1) / np.sqrt(len(lengths))
    counters = client.counters
    return (
        f"| {name} | {len(lengths)} | {counters.dropped['retracted']} | {lengths.mean():.1f} +-"
        f" {error:.1f} | {(lengths >= LONG).mean():.1%} |"
    )


def retraction_table(rollouts: list[Rollout], client: Counting) -> str:
    lines = ["| response tokens | responses | retracted |", "|---|---|---|"]
    for low, high in pairwise(BINS):
        is_retracted = [
            client.retractions[r.id] > 0 for r in rollouts if low <= r.response_length < high
        ]
        share = f"{np.mean(is_retracted):.1%}" if is_retracted else ""
        lines.append(
            f"| {low} to {high - 1} | {len(is_retracted)} | {sum(is_retracted)} ({share}) |"
        )
    return "\n".join(lines)


@torch.no_grad()
def transformers_rows(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return transformers' experts [S - 1, L, K], sorted in each row."""
    output = model(torch.from_numpy(tokens)[None], output_router_logits=True)
    rows = torch.stack([logits.topk(SPEC.top_k).indices for logits in output.router_logits], dim=1)
    return rows[: len(tokens) - 1].sort(-1).values.numpy()


def prefill_rows(http: httpx.Client, tokens: np.ndarray) -> np.ndarray:
    """Return the server's experts [S - 1, L, K], sorted in each row, of one prefill of all tokens
    with an empty cache.
    """
    while http.post("/flush_cache").status_code != 200:
        pass
    body = {
        "input_ids": tokens.tolist(),
        "return_routed_experts": True,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    answer = http.post("/generate", json=body).raise_for_status().json()
    rows = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return np.sort(rows.reshape(len(tokens) - 1, SPEC.num_layers, SPEC.top_k), axis=-1)


def rows_table(
    url: str, checkpoint: Path, dtype: str, rollouts: list[Rollout], client: Counting, limit: int
) -> str:
    """Return (row, layer) pairs of responses whose experts differ, by whether the response was
    retracted.
    """
    from transformers import Qwen3MoeForCausalLM  # seconds to import

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    other: Counter[tuple[bool, str]] = Counter()
    with httpx.Client(base_url=url, timeout=60.0) as http:
        for is_retracted in (True, False):
            chosen = [r for r in rollouts if (client.retractions[r.id] > 0) == is_retracted]
            for rollout in sorted(chosen, key=lambda r: -r.response_length)[:limit]:
                assert rollout.routed_experts is not None
                first = rollout.prompt_length - 1
                served = np.sort(rollout.routed_experts[first:], axis=-1)
                other[is_retracted, "pairs"] += served[..., 0].size
                for name, rows in (
                    ("transformers", transformers_rows(model, rollout.tokens)),
                    ("prefill", prefill_rows(http, rollout.tokens)),
                ):
                    other[is_retracted, name] += int((served != rows[first:]).any(-1).sum())
    lines = [
        "| responses | (row, layer) pairs | not transformers' | not those of a prefill |",
        "|---|---|---|---|",
    ]
    for is_retracted, name in ((True, "retracted"), (False, "not retracted")):
        pairs = other[is_retracted, "pairs"] or 1
        cells = [
            f"{other[is_retracted, key]} ({other[is_retracted, key] / pairs:.2%})"
            for key in ("transformers", "prefill")
        ]
        lines.append(f"| {name} | {other[is_retracted, 'pairs']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def taken_back_line(log: Path, kept: list[Rollout], client: Counting) -> str:
    """Return the line about what the server says it freed.

    A response that was retracted twice counts twice, so it bounds the second forward's rows.
    """
    freed = [int(number) for number in re.findall(r"#new_tokens_gained: (\d+)", log.read_text())]
    rows = sum(len(r.tokens) - 1 for r in kept if client.retractions[r.id])
    return (
        f"tokens freed by retractions: {sum(freed)}; rows of the retracted responses, prompts"
        f" included: {rows}"
    )


def measure(args: argparse.Namespace, folder: Path) -> None:
    os.environ["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = str(CLIP)
    checkpoint = random_checkpoint(folder / "tiny", dtype=getattr(torch, args.dtype))
    cfg = RolloutConfig(
        dtype=args.dtype,
        max_total_tokens=args.tokens,
        max_running_requests=args.running,
        max_retries=100,
    )
    with launch_server(
        checkpoint, cfg, device="cpu", log_path=folder / "server.log", seed=0
    ) as server:
        kept, client = sample(server.url, cfg, args.responses, drops=False)
        print(retraction_table(kept, client), flush=True)
        print(
            f"\n| retracted responses are | responses | dropped | mean tokens | at least {LONG}"
            " |\n|---|---|---|---|---|"
        )
        print(lengths_line("kept", kept, client), flush=True)
        taken_back = taken_back_line(server.log_path, kept, client)
        if not args.no_drop:
            print(
                lengths_line("sampled again", *sample(server.url, cfg, args.responses, drops=True)),
                flush=True,
            )
        table = rows_table(server.url, checkpoint, args.dtype, kept, client, args.rows)
        print(f"\n{taken_back}\n\n{table}")


# Simulated ----------------------------------------------------------------------------------------


def simulate(num_steps: int, seed: int = 0) -> str:
    """Return mean trained length / mean drawn length of steps in which one event occurs, and the
    number of responses drawn again.

    All responses of a step start together and grow at the same rate.  At the event, responses in
    progress are lost and drawn again ("again"), or kept ("continued").  A server has half of the
    responses; a deadline or a signal affects all.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, 1024)
    first, second = (np.clip(rng.lognormal(np.log(3000), 0.8, shape), 1, 32_768) for _ in range(2))
    lines = [
        "| event | in progress then: drawn again | mean length / that drawn |",
        "|---|---|---|",
    ]
    when = rng.uniform(0, first.max(1, keepdims=True))
    half = np.arange(shape[1]) < shape[1] // 2
    for name, meets in (
        ("a server of two dies, at any time of the step", (first > when) & half),
        ("a signal, at any time of the step, if drawn again", first > when),
        ("a deadline at the 99th percentile, if drawn again", first > np.quantile(first, 0.99)),
        ("a deadline at the 90th percentile, if drawn again", first > np.quantile(first, 0.90)),
        ("deadline or signal, continued", np.zeros(shape, bool)),
    ):
        trained = np.where(meets, second, first)
        lines.append(f"| {name} | {meets.mean():.2%} | {trained.mean() / first.mean():.4f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=1120)
    parser.add_argument("--tokens", type=int, default=1500, help="of the KV cache")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--rows", type=int, default=200, help="responses of each kind whose rows are compared"
    )
    parser.add_argument("--no-drop", action="store_true", help="only the client as it is")
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    if args.simulate:
        print(simulate(num_steps=2000))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
