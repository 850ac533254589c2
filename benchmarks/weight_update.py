"""Measured: log-probs and routes of responses whose weights change while they are sampled, on a
real SGLang server on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/weight_update.py [--responses 48] [--change 0.001 0.01 0.1]

A tiny random Qwen3-MoE in float32 samples batches of 8.  In the middle of each: /pause_generation,
new weights (every tensor of the old ones plus noise of --change times its norm),
/continue_generation.

    in_place  requests are kept with their keys and values
    retract   requests are kept, and computed again from the start
    abort     requests are cut short, and continued by new ones
    overlap   in_place on a server with SGLang's default schedule

Reported of tokens before and after the change: |log mu - log pi_old|, where log mu is the server's,
and pi_old is transformers' forward of the complete sequence under the weights that the server names
for the token; and rows that are not those of the forward that sampled the next token.  That forward
read keys and values of the old weights with in_place, of the new ones otherwise; transformers does
the same ("as sampled"). Last, the same prompts are sampled after an in_place change, with and
without a key of their own for the prefix cache.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Rollout
from megatron_rl.rollout.server.process import launch_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.length_bias import SPEC
from benchmarks.retraction_rows import PROMPT_TOKENS, Streamed, stream
from tests.e2e.reference import as_sampled, hf_logprobs_and_routes, of_rows
from tests.tiny import changed_checkpoint, random_checkpoint  # the tests' checkpoint

BATCH, TOKENS = 8, 160
MODES = ("in_place", "retract", "abort")
Samples = dict[int, dict[str, Any]]


class Bench:
    """A server, and its weights by version."""

    def __init__(self, http: httpx.Client, checkpoints: dict[int, Path]) -> None:
        self.http, self.checkpoints = http, checkpoints

    def post(self, path: str, **body: Any) -> None:
        self.http.post(path, json=body).raise_for_status()

    def load(self, version: int) -> None:
        self.post(
            "/update_weights_from_disk",
            model_path=str(self.checkpoints[version]),
            flush_cache=False,
        )
        self.post("/update_weight_version", new_version=str(version), abort_all_requests=False)

    def flush(self) -> None:
        while self.http.post("/flush_cache").status_code != 200:
            time.sleep(0.02)

    def change(self, mode: str, version: int) -> float:
        """Change to the next weights; returns the seconds for which the server did not sample."""
        start = time.monotonic()
        self.post("/pause_generation", mode=mode)
        if mode != "in_place":
            self.flush()
        self.load(version)
        self.post("/continue_generation")
        return time.monotonic() - start

    def sample(
        self, prompts: Sequence[Sequence[int]], most: Sequence[int], key: str | None = None
    ) -> Samples:
        return dict(
            enumerate(
                self.http.post("/generate", json=request(prompts, most, key))
                .raise_for_status()
                .json()
            )
        )


def request(
    prompts: Sequence[Sequence[int]], most: Sequence[int], key: str | None
) -> dict[str, Any]:
    limits = [{"max_new_tokens": limit, "temperature": 1.0, "ignore_eos": True} for limit in most]
    flags = {"return_logprob": True, "return_routed_experts": True}
    return {
        "input_ids": prompts,
        "sampling_params": limits,
        **flags,
        **({} if key is None else {"extra_key": key}),
    }


def changed_in_the_middle(
    bench: Bench, prompts: list[list[int]], mode: str, change_at: int
) -> tuple[Samples, float]:
    """Sample with weights 0 and then 1, and return the samples and the length of the pause."""
    bench.change("abort", 0)
    streamed, url = Streamed(), str(bench.http.base_url)
    body = request(prompts, [TOKENS] * BATCH, "0") | {"stream": True}
    thread = threading.Thread(target=stream, args=(url, body, streamed), daemon=True)
    thread.start()
    while streamed.shortest(BATCH) < change_at and thread.is_alive():
        streamed.grown.wait(1.0)
        streamed.grown.clear()
    seconds = bench.change(mode, 1)
    thread.join()
    if mode != "abort":
        return streamed.last, seconds
    first = streamed.last
    inputs = [prompt + first[i]["output_ids"] for i, prompt in enumerate(prompts)]
    continued = bench.sample(
        inputs, [TOKENS - len(first[i]["output_ids"]) for i in range(BATCH)], "1"
    )
    return {i: joined(prompts[i], first[i], continued[i]) for i in range(BATCH)}, seconds


def joined(prompt: list[int], first: dict[str, Any], continued: dict[str, Any]) -> dict[str, Any]:
    """Join prefix and continuation as rollout/client/response.py does."""
    before, after = first["meta_info"], continued["meta_info"]
    size, rows = len(first["output_ids"]), rows_of(continued)
    rows[: len(prompt) + size - 1] = rows_of(first)
    later = [
        span | {"start": span["start"] + size, "end": span["end"] + size}
        for span in after["weight_versions"]
    ]
    meta = after | {
        "weight_versions": before["weight_versions"] + later,
        "output_token_logprobs": before["output_token_logprobs"] + after["output_token_logprobs"],
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
    }
    return {"output_ids": first["output_ids"] + continued["output_ids"], "meta_info": meta}


def rows_of(sample: dict[str, Any]) -> np.ndarray:
    rows = np.frombuffer(base64.b64decode(sample["meta_info"]["routed_experts"]), "<i4")
    return rows.reshape(-1, SPEC.num_layers, SPEC.top_k).copy()


def to_rollout(prompt: Sequence[int], sample: dict[str, Any]) -> Rollout:
    meta = sample["meta_info"]
    spans = [
        (int(span["version"]), span["end"] - span["start"]) for span in meta["weight_versions"]
    ]
    versions, sizes = zip(*spans, strict=True)
    return Rollout(
        id="q",
        tokens=np.array([*prompt, *sample["output_ids"]]),
        prompt_length=len(prompt),
        rollout_logprobs=np.array(
            [entry[0] for entry in meta["output_token_logprobs"]], np.float32
        ),
        routed_experts=rows_of(sample).astype(np.uint8),
        finish_reason="length",
        policy_versions=np.repeat(np.array(versions, np.int32), sizes),
    )


def compare(
    bench: Bench, rollout: Rollout, values: dict[str, list[np.ndarray]], *, keeps: bool
) -> None:
    """Append the differences of log-probs, and whether rows differ, before and after the change.

    keeps: whether tokens after the change attend to the keys and values of earlier weights.
    """
    versions, by_row = rollout.policy_versions, of_rows(rollout)
    log_pi, routes = as_sampled(bench.checkpoints, rollout)
    log_sampled = log_pi.copy()
    for version in set(versions.tolist()):
        full, full_routes = hf_logprobs_and_routes(bench.checkpoints[version], rollout, 1.0)
        log_pi[versions == version] = full[versions == version]
        if not keeps:
            routes[by_row == version] = full_routes[by_row == version]
    if not keeps:
        log_sampled = log_pi
    assert rollout.routed_experts is not None
    other = (np.sort(rollout.routed_experts, axis=-1) != routes).any((1, 2))[
        rollout.prompt_length - 1 :
    ]
    for name, which in (("before", versions == 0), ("after", versions == 1)):
        values[f"{name}: log pi_old"].append(np.abs(rollout.rollout_logprobs - log_pi)[which])
        values[f"{name}: as sampled"].append(np.abs(rollout.rollout_logprobs - log_sampled)[which])
        values[f"{name}: rows"].append(other[which])


def line(mode: str, change: float, lists: dict[str, list[np.ndarray]], pauses: list[float]) -> str:
    values = {name: np.concatenate(parts) for name, parts in lists.items()}
    before, after = values["before: log pi_old"], values["after: log pi_old"]
    rows = [f"{values[f'{name}: rows'].mean():.1%}" for name in ("before", "after")]
    return (
        f"| {mode} | {change:g} | {before.max():.1e} | {after.mean():.1e} |"
        f" {np.percentile(after, 99):.1e} | {after.max():.1e} |"
        f" {values['after: as sampled'].max():.1e} | {rows[0]} | {rows[1]} |"
        f" {np.median(pauses):.2f} |"
    )


HEAD = """
| mode | change | before: largest | after: mean | 99 % | largest | as sampled: largest \
| rows before | rows after | pause |
|---|---|---|---|---|---|---|---|---|---|"""


def measure(
    bench: Bench, mode: str, num_responses: int, rng: np.random.Generator
) -> tuple[Any, list[float]]:
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    pauses = []
    for _ in range(num_responses // BATCH):
        prompts = rng.integers(2, SPEC.vocab_size, (BATCH, PROMPT_TOKENS)).tolist()
        samples, seconds = changed_in_the_middle(
            bench, prompts, mode, int(rng.integers(20, TOKENS - 60))
        )
        pauses.append(seconds)
        for index, prompt in enumerate(prompts):
            compare(bench, to_rollout(prompt, samples[index]), values, keeps=mode == "in_place")
    return values, pauses


def again(bench: Bench, rng: np.random.Generator) -> str:
    """Sample prompts of weights 0 again after an in_place change."""
    prompts = rng.integers(2, SPEC.vocab_size, (BATCH, PROMPT_TOKENS)).tolist()
    changed_in_the_middle(bench, prompts, "in_place", 20)
    lines = []
    for key in ("0", "1"):
        samples = bench.sample(prompts, [20] * BATCH, key)
        values: dict[str, list[np.ndarray]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            compare(bench, to_rollout(prompt, samples[index]), values, keeps=False)
        cached = [sample["meta_info"]["cached_tokens"] for sample in samples.values()]
        largest = np.concatenate(values["after: log pi_old"]).max()
        lines.append(
            f"key {key!r}: {sum(cached)} of {BATCH * PROMPT_TOKENS} prompt tokens cached, largest"
            f" {largest:.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=48, help="for each mode and change")
    parser.add_argument("--change", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = random_checkpoint(folder / "old")
        new = {
            change: changed_checkpoint(folder / f"new_{change:g}", old, change)
            for change in args.change
        }
        print(HEAD, flush=True)
        for modes, options in ((MODES, ("--disable-overlap-schedule",)), (("overlap",), ())):
            cfg = RolloutConfig(
                dtype="float32", max_total_tokens=8192, max_running_requests=16, server_args=options
            )
            with (
                launch_server(
                    old, cfg, device="cpu", log_path=folder / "server.log", seed=0
                ) as server,
                httpx.Client(base_url=server.url, timeout=120.0) as http,
            ):
                for change in args.change:
                    bench = Bench(http, {0: old, 1: new[change]})
                    for mode in modes:
                        rng = np.random.default_rng(0)  # the same prompts
                        measured = measure(
                            bench, "in_place" if mode == "overlap" else mode, args.responses, rng
                        )
                        print(line(mode, change, *measured), flush=True)
                if modes == MODES:
                    print(again(bench, np.random.default_rng(1)), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
