"""Bytes and seconds of a teacher's answer, by loss.teacher_top_k.

    OMP_NUM_THREADS=1 python -m benchmarks.teacher_scores [--tokens 2048] [--sequences 8]

A real SGLang server on the CPU with a random model of 4 layers and a vocabulary of 4,096.  Every
sequence is scored once to fill the prefix cache, then once for each K, one after the other.

    answer     bytes of the HTTP answer for a scored token
    kept       bytes of the numbers in a rollout, in checkpoints and files, for a token
    server     seconds of the request for 1,000 tokens, without reading the answer
    read       seconds of reading and checking the answer for 1,000 tokens
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.records.teacher_scores import TeacherScores
from megatron_rl.rollout.client.score_request import ScoreRequest
from megatron_rl.rollout.client.teachers import parsed
from megatron_rl.rollout.server.process import launch_server
from tests.tiny import random_checkpoint

VOCABULARY, PROMPT = 4096, 16
TOP_K = (0, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = [
        rng.integers(2, VOCABULARY, PROMPT + args.tokens).tolist() for _ in range(args.sequences)
    ]
    found: dict[int, list[tuple[float, ...]]] = {k: [] for k in TOP_K}
    cfg = RolloutConfig(dtype="float32", max_total_tokens=65536, max_running_requests=8)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        # SGLang refuses an input as long as the context
        longest = PROMPT + args.tokens + 8
        random_checkpoint(model, vocab_size=VOCABULARY, max_position_embeddings=longest)
        log = Path(folder) / "server.log"
        with (
            launch_server(model, cfg, log_path=log, device="cpu", seed=0, want_routes=False) as it,
            httpx.Client(base_url=it.url, timeout=600) as http,
        ):
            for text in texts:
                score(http, text, 0)
                for k in TOP_K:
                    found[k].append(score(http, text, k))
    print("| K | answer, bytes | kept, bytes | server, s | read, s |\n|---|---|---|---|---|")
    for k, rows in found.items():
        answer, kept, server, read = (median(column) for column in zip(*rows, strict=True))
        print(f"| {k} | {answer:.0f} | {kept:.1f} | {server:.3f} | {read:.4f} |")


def score(http: httpx.Client, tokens: list[int], k: int) -> tuple[float, float, float, float]:
    """Return a row of the table for one sequence."""
    request = ScoreRequest(f"r{k}", tokens, PROMPT, VOCABULARY, k)
    count = len(tokens) - PROMPT
    began = time.perf_counter()
    content = http.post("/generate", json=request.body()).raise_for_status().content
    answered = time.perf_counter()
    scores = request.scores(parsed(memoryview(content)), np.arange(count))
    done = time.perf_counter()
    seconds = ((b - a) * 1000 / count for a, b in ((began, answered), (answered, done)))
    return len(content) / count, bytes_of(scores) / count, *seconds


def bytes_of(scores: TeacherScores) -> int:
    top = scores.top
    return scores.logprobs.nbytes + (0 if top is None else top.sets.nbytes + top.logprobs.nbytes)


if __name__ == "__main__":
    main()
