"""Random conversations with a model that a real SGLang server serves: what an episode learns from
is what its client read, and its log-probs and experts are those of transformers.

    OMP_NUM_THREADS=1 python -m tests.conversations.served --model DIR [--num 200] [--seed 0]

DIR: a Qwen3-MoE checkpoint whose tokenizer has Qwen3's chat format, such as one of `megatron-rl
make-tiny-model DIR --task chat`.  Training and serving are in float32.
"""

from __future__ import annotations

import argparse
import base64
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_rl.config import RolloutConfig
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.records import Rollout
from megatron_rl.rollout.server.process import launch_server
from tests.conversations.__main__ import MOST_SHOWN, client_of, converse
from tests.conversations.model import RandomModel, Sampled, sampling_params
from tests.conversations.proof import Program
from tests.e2e.reference import wrong_tokens
from tests.fake_server import VERSION, FakeServer

LONGEST_ANSWER = 60


class ServedModel(RandomModel):
    """Asks a real server; the rest of the conversation is that of RandomModel."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, url: str, spec: ModelSpec) -> None:
        super().__init__(tokenizer)
        self.http, self.spec = httpx.Client(base_url=url, timeout=120), spec

    def answer(
        self, body: dict[str, Any], prompt: list[int], sample_id: str
    ) -> tuple[dict[str, Any], Sampled]:
        params = {**sampling_params(body), "n": 1}
        # a name of its own, as the server may still hold a request that was cut; experts of all
        # rows, from which FakeServer takes those that the client asks for
        request = {**body, "rid": uuid4().hex, "input_ids": prompt, "sampling_params": params}
        request.pop("routed_experts_start_len", None)
        made = self.http.post("/generate", json=request).raise_for_status().json()
        meta, tokens = made["meta_info"], made["output_ids"]
        versions = [{"version": str(VERSION), "start": 0, "end": len(tokens)}]
        meta |= {"id": sample_id, "weight_version": str(VERSION), "weight_versions": versions}
        logprobs = np.float32([logprob for logprob, *_ in meta["output_token_logprobs"]])
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        routes = routes.reshape(-1, self.spec.num_layers, self.spec.top_k)
        return made, Sampled(tuple(prompt), tuple(tokens), logprobs, routes)


class ShortProgram(Program):
    """Every answer has a limit: the model may not end it."""

    def settings(self) -> dict[str, Any]:
        return {"limit": LONGEST_ANSWER, **super().settings()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    counts, wrong = run(arguments.model, arguments.num, arguments.seed)
    for name, count in sorted(counts.items()):
        print(f"{name:28s} {count:10,}")
    print(f"{'violations':28s} {len(wrong):10,}")
    print("\n".join(wrong[:MOST_SHOWN]))
    return bool(wrong)


def run(checkpoint: Path, num: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return counts and violations of `num` conversations."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    spec = make_spec(load_hf_config(checkpoint))
    cfg = RolloutConfig(dtype="float32", max_total_tokens=32768, max_running_requests=8)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with launch_server(checkpoint, cfg, device="cpu", log_path=log, seed=seed) as server:
            model = ServedModel(tokenizer, server.url, spec)
            with FakeServer("ok", source=model.sample) as front:
                client = client_of(front.url, "qwen3", tokenizer, spec=spec)
                for number in range(seed, seed + num):
                    program = ShortProgram(number, model)
                    texts, rollout = converse(client, model, program, counts)
                    texts += differences(checkpoint, rollout, counts)
                    wrong += [f"seed {number}: {text}" for text in texts]
                    front.requests.clear()
                    front.served.clear()
    counts["conversations"] = num
    return counts, wrong


def differences(checkpoint: Path, rollout: Rollout | None, counts: Counter[str]) -> list[str]:
    """Return how the sequences differ from what transformers computes for them."""
    texts = []
    for sequence in () if rollout is None else rollout.sequences:
        logprobs, rows = wrong_tokens(checkpoint, sequence)
        counts["log-probs compared"] += len(sequence.rollout_logprobs)
        counts["rows of experts compared"] += len(sequence.tokens) - 1
        if logprobs or rows:
            texts.append(f"{logprobs} log-probs and {rows} rows of experts are not transformers'")
    return texts


if __name__ == "__main__":
    sys.exit(main())
