"""Measured: routes of retracted responses against those of the forward that sampled, on a real
SGLang server on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/retraction_rows.py [--dtype bfloat16] [--batch 8] \
[--responses 48]

A tiny random Qwen3-MoE samples greedily, with a frequency penalty against loops, so the same batch
of prompts gives the same tokens by the same forwards.  Each batch is sampled three times:
undisturbed, undisturbed again (the noise of the method), and with /pause_generation mode retract in
between.  The stream of tokens shows the number n of tokens before the retraction of each
response: the first n rows are of the second forward, and the rows of the undisturbed response are
those of the forward that sampled.

Shapes: S tokens of a sequence, P of them prompt, R response, n before the retraction; rows [S - 1,
L, K], sorted in each row.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.process import launch_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.length_bias import SPEC, prefill_rows, transformers_rows
from tests.tiny import random_checkpoint  # the tests' checkpoint

PROMPT_TOKENS, QUIET_SECONDS = 8, 0.5  # a pause of the stream that says: the server has stopped


@dataclass
class Streamed:
    """The responses to a batch, as far as they have arrived."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Index of a response -> tokens."""
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Index of a response -> its last chunk."""
    grown: threading.Event = field(default_factory=threading.Event)

    def shortest(self, size: int) -> int:
        return (
            min((len(t) for t in self.tokens.values()), default=0)
            if len(self.tokens) == size
            else 0
        )

    def lengths(self, size: int) -> list[int]:
        return [len(self.tokens.get(i, ())) for i in range(size)]

    def rows(self, index: int) -> np.ndarray:
        meta = self.last[index]["meta_info"]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        return np.sort(rows.reshape(-1, SPEC.num_layers, SPEC.top_k), axis=-1)


def sample(url: str, prompts: list[list[int]], num_tokens: int, streamed: Streamed) -> None:
    body = {
        "input_ids": prompts,
        "stream": True,
        "return_routed_experts": True,
        "sampling_params": {
            "max_new_tokens": num_tokens,
            "temperature": 0.0,
            "frequency_penalty": 0.5,
            "ignore_eos": True,
        },
    }
    stream(url, body, streamed)


def stream(url: str, body: dict[str, Any], streamed: Streamed) -> None:
    """Yield the answers to a batch with "stream": true."""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120.0) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            index = chunk.get("index", 0)
            streamed.tokens[index] = chunk["output_ids"]
            streamed.last[index] = chunk
            streamed.grown.set()


def sampled(
    http: httpx.Client, prompts: list[list[int]], num_tokens: int, retract_at: int = 0
) -> tuple[Any, list[int]]:
    """Return what arrived, and the number of tokens of each response when all were retracted (0:
    not retracted).
    """
    while http.post("/flush_cache").status_code != 200:
        pass
    streamed, places = Streamed(), [0] * len(prompts)
    thread = threading.Thread(
        target=sample, args=(str(http.base_url), prompts, num_tokens, streamed), daemon=True
    )
    thread.start()
    if retract_at:
        while streamed.shortest(len(prompts)) < retract_at and thread.is_alive():
            streamed.grown.wait(1.0)
            streamed.grown.clear()
        http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        streamed.grown.clear()
        while streamed.grown.wait(QUIET_SECONDS):
            streamed.grown.clear()
        places = streamed.lengths(len(prompts))
        http.post("/continue_generation", json={}).raise_for_status()
    thread.join()
    return streamed, places


def differing(counts: Counter[str], name: str, ours: np.ndarray, other: np.ndarray) -> None:
    unlike = (ours != other).any(-1)
    counts[f"{name} rows"] += int(unlike.any(-1).sum())
    counts[f"{name} pairs"] += int(unlike.sum())
    counts[f"{name} all"] += len(ours)


def compare(
    http: httpx.Client, model: Any, prompts: list[list[int]], num_tokens: int, retract_at: int
) -> Counter[str]:
    """Compare the rows of the tokens before the retraction, by reference."""
    first, _ = sampled(http, prompts, num_tokens)
    again, _ = sampled(http, prompts, num_tokens)
    retracted, places = sampled(http, prompts, num_tokens, retract_at)
    counts: Counter[str] = Counter()
    for i, (prompt, n) in enumerate(zip(prompts, places, strict=True)):
        tokens = first.tokens[i]
        is_same = tokens == again.tokens[i] and tokens[:n] == retracted.tokens[i][:n]
        times = retracted.last[i]["meta_info"]["num_retractions"]
        if not is_same or times != 1 or not 0 < n < num_tokens:
            counts["unusable"] += 1
            continue
        rows = slice(len(prompt) - 1, len(prompt) - 1 + n)  # those that sampled the first n tokens
        counts["responses"] += 1
        counts["tokens"] += len(retracted.tokens[i])
        sequence = np.array(prompt + retracted.tokens[i])
        ours, reference = retracted.rows(i)[rows], first.rows(i)[rows]
        prefill, theirs = (
            prefill_rows(http, sequence)[rows],
            transformers_rows(model, sequence)[rows],
        )
        differing(counts, "sampled again, undisturbed", again.rows(i)[rows], reference)
        differing(counts, "retracted", ours, reference)
        differing(counts, "retracted, against a prefill of the server", ours, prefill)
        differing(counts, "transformers", theirs, reference)
    return counts


def table(dtype: str, batch: int, counts: Counter[str]) -> str:
    lines = [
        (
            f"{dtype}, batches of {batch}: {counts['responses']} responses of {counts['tokens']}"
            f" tokens ({counts['unusable']} unusable)"
        ),
        "",
        "| rows of the first n tokens | rows | differ | (row, layer) pairs that differ |",
        "|---|---|---|---|",
    ]
    for key in [name for name in counts if name.endswith(" all")]:
        name, rows = key.removesuffix(" all"), counts[key]
        pairs = rows * SPEC.num_layers
        other, unlike = counts[f"{name} rows"], counts[f"{name} pairs"]
        lines.append(
            f"| {name} | {rows} | {other} ({other / rows:.2%}) | {unlike} ({unlike / pairs:.3%}) |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=48)
    parser.add_argument(
        "--batch", type=int, default=8, help="responses sampled, and retracted, together"
    )
    parser.add_argument("--tokens", type=int, default=160, help="of each response")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    from transformers import Qwen3MoeForCausalLM  # seconds to import

    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        dtype = getattr(torch, args.dtype)
        checkpoint = random_checkpoint(Path(folder) / "tiny", dtype=dtype)
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        cfg = RolloutConfig(
            dtype=args.dtype, max_total_tokens=8192, max_running_requests=max(16, args.batch)
        )
        log = Path(folder) / "server.log"
        with (
            launch_server(checkpoint, cfg, device="cpu", log_path=log, seed=0) as server,
            httpx.Client(base_url=server.url, timeout=120.0) as http,
        ):
            for _ in range(args.responses // args.batch):
                prompts = rng.integers(2, SPEC.vocab_size, (args.batch, PROMPT_TOKENS)).tolist()
                counts += compare(
                    http, model, prompts, args.tokens, int(rng.integers(1, args.tokens - 20))
                )
    print(table(args.dtype, args.batch, counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
