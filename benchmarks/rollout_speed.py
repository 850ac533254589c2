"""Continuous sampling, measured against its simulation: the real Scheduler, Inference and client
over HTTP with a slow server.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout_speed [--repeats 3] [--k 0 1 2 4] [--update \
abort] [--base 0.06]

The server (of tests/fake_server.py) answers each request when its responses would be complete: it
follows the model of benchmarks/sampling_model.py in real time.  Training and weight syncs are
sleeps.  Lengths, and all parameters, are those of the simulation beside it: a step of 8 prompts x 4
responses, with the length distribution of benchmarks/rollout_sim.py in tokens that take 4 times
--base / 32,768 of its time.  A ratio of 1: the simulation predicts the speed-up over k = 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.sampling_model import Key, Record, Response, Servers, Speed, Workload
from benchmarks.sampling_modes import one_rank, simulate, with_update_share
from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.scheduler import Scheduler
from tests.fake_server import SPEC, FakeServer

PARALLEL = SimpleNamespace(
    dp_rank=0, dp_size=1, rank=0, device=torch.device("cpu"), host_group=None
)
LOW, FIRST = (
    30,
    4,
    # a prompt is (3, FIRST + number % LOW, FIRST + number // LOW); response k begins with the token
    # FIRST + k
)


@dataclass
class Request:
    """A request of a batch of responses."""

    responses: set[Key]
    """Responses that are not complete yet."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when all are complete or aborted."""


class SlowServer(FakeServer):
    """Answers when the responses are complete, or aborted, by the clock of `Servers`."""

    def __init__(self, workload: Workload, speed: Speed) -> None:
        super().__init__("ok")
        self.workload, self.version = workload, 0
        self.changed = threading.Condition()
        self.servers, self.began = Servers(speed, self.finished), time.monotonic()
        self.live: dict[Key, tuple[Response, Request]] = {}
        self.by_id: dict[str, tuple[Response, Request]] = {}
        self.sampled: dict[Key, int] = {}  # tokens that exist
        threading.Thread(target=self.decode, daemon=True).start()

    def decode(self) -> None:
        while not self.stopping.is_set():
            with self.changed:
                self.advance()
                self.changed.wait(min(1.0, max(1e-4, self.servers.next_end - self.servers.clock)))

    def advance(self) -> None:
        self.servers.advance(time.monotonic() - self.began)

    def finished(self, response: Response) -> None:
        _, request = self.live[response.key]
        request.responses.discard(response.key)
        if not request.responses:
            request.ended.set()

    def route(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/abort_request":
            self.stop_response(body["rid"])
        super().route(handler, body)

    def stop_response(self, name: str) -> None:
        with self.changed:
            self.advance()
            if name in self.by_id:
                response, request = self.by_id[name]
                if response.key in request.responses:
                    self.servers.remove(response)
                    self.finished(response)
            self.changed.notify()

    def honest(self, body: dict[str, Any]) -> dict[str, dict[str, Any]]:
        with self.changed:
            self.advance()
            responses = self.responses(body["input_ids"])
            request = Request({response.key for response in responses})
            names = [f"{body['rid']}_{place}" for place in range(len(responses))]
            for name, response in zip(names, responses, strict=True):
                self.live[response.key] = self.by_id[name] = response, request
                self.servers.submit(response)
            self.changed.notify()
        while not (request.ended.wait(1.0) or self.stopping.is_set()):
            pass
        with self.changed:
            for name, response in zip(names, responses, strict=True):
                del self.live[response.key], self.by_id[name]
            return {
                name: self.sample(response, name)
                for name, response in zip(names, responses, strict=True)
            }

    def responses(self, inputs: list[list[int]]) -> list[Response]:
        """Return the responses that these tokens continue, or others of the prompt that are not in
        progress.
        """
        number = inputs[0][1] - FIRST + LOW * (inputs[0][2] - FIRST)
        lengths = self.workload.lengths(number)
        continued = {(number, ids[3] - FIRST) for ids in inputs if len(ids) > 3}
        free = [
            key
            for k in range(len(lengths))
            if (key := (number, k)) not in self.live and key not in continued
        ]
        free.sort(key=lambda key: self.sampled.get(key, 0) > 0)
        matches = []
        for ids in inputs:
            done = len(ids) - 3
            key = (number, ids[3] - FIRST) if done else free.pop(0)
            self.sampled[key] = done
            matches.append(Response(key, lengths[key[1]], [(0, done)] if done else []))
        return matches

    def sample(self, response: Response, name: str) -> dict[str, Any]:
        before, done = self.sampled[response.key], int(response.done + 1e-6)
        self.sampled[response.key] = done
        new = [FIRST + response.key[1] if place == 0 else 2 for place in range(before, done)]
        reason = (
            {"type": "length", "length": len(new)}
            if done == self.workload.cap
            else {"type": "stop", "matched": 1}
        )
        if done == response.length and reason["type"] == "stop":
            new[-1] = 1
        meta = {
            "id": name,
            "finish_reason": reason
            if done == response.length
            else {"type": "abort", "message": "Abort"},
            "prompt_tokens": 3 + before,
            "completion_tokens": len(new),
            "weight_version": str(self.version),
            "num_retractions": 0,
            "output_token_logprobs": [[-1.0, token, None] for token in new],
        }
        return {"output_ids": new, "meta_info": meta}


def measure(workload: Workload, speed: Speed, settings: dict[str, object]) -> Record:
    """Run `workload.steps` steps of the loop of train.py without training."""
    rollout = {"max_response_tokens": workload.cap, "max_concurrency": 10_000} | settings
    sections = {
        "run": {
            "num_steps": workload.steps,
            "prompts_per_step": workload.prompts,
            "group_size": workload.group,
        },
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "replay": {"mode": "none", "measure": False},
        "rollout": rollout,
    }
    cfg, record = load_config(None, [], sections), Record(workload)
    prompts = [
        Prompt(str(n), "", (3, FIRST + n % LOW, FIRST + n // LOW), "") for n in range(LOW * LOW)
    ]
    source = PromptSource(prompts, seed=0, shuffle=False)
    with one_rank(), SlowServer(workload, speed) as server:

        def push(export: object, version: int, **options: object) -> None:
            time.sleep(workload.sync)
            server.version = version

        client = RolloutClient([server.url], cfg.rollout, SampleRules(SPEC, want_routes=False))
        pusher = SimpleNamespace(push=push, set_urls=lambda urls: None)
        inference = Inference(
            lambda: (), client=client, pusher=pusher, server_pool=None, urls=[server.url], log=print
        )  # fmt: skip
        scheduler = Scheduler(
            cfg, PARALLEL, inference, source, [1], lambda *_: nullcontext(lambda amount: None)
        )
        started = time.monotonic()
        try:
            for step in range(workload.steps):
                began = time.monotonic()
                sampled = scheduler.take(step, step)
                record.idle += time.monotonic() - began
                seconds = record.train(
                    [
                        ((int(r.id.split("/")[0]), int(r.id.split("/")[1])), segments(r))
                        for g in sampled.groups
                        for r in g.rollouts
                    ],
                    step,
                )
                time.sleep(seconds)
                began = time.monotonic()
                scheduler.end_sampling()
                record.idle += time.monotonic() - began
                inference.push(step + 1)
                scheduler.step_done()
                record.step_done(time.monotonic() - started)
        finally:
            inference.stop()
        record.stale = client.counters.stale_samples
        waiting = [int(prompt.id) for prompt in (*scheduler.queue, *source.returned)]
        record.check(range(source.position), waiting, cfg.rollout.max_staleness)
    return record


def segments(rollout: Rollout) -> list[tuple[int, float]]:
    return [
        (version, len(list(tokens)))
        for version, tokens in groupby(rollout.policy_versions.tolist())
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument(
        "--update", choices=["drain", "abort"], default="abort", help="rollout.weight_update"
    )
    parser.add_argument("--base", type=float, default=0.06, help="seconds of a token")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(argv)
    speed = Speed(
        servers=1, slots=96, base=args.base, per_request=args.base / 128, prefill=args.base / 400
    )
    workload = Workload(prompts=8, group=4, steps=args.steps, median=12, cap=128, sync=0.1)
    workload = with_update_share(workload, speed)
    modes = {k: {"max_staleness": k, "weight_update": args.update} if k else {} for k in args.k}
    simulated = {k: simulate(workload, speed, settings) for k, settings in modes.items()}
    print(
        "| k | repeat | load | simulated s | measured s | speed-up simulated | measured | ratio |"
        " idle | age |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for repeat in range(args.repeats):
        measured: dict[int, Record] = {}
        for k, settings in modes.items():
            record = measured[k] = measure(workload, speed, settings)
            expected = simulated[args.k[0]].seconds / simulated[k].seconds
            ratio = measured[args.k[0]].seconds / record.seconds
            cells = [
                k, repeat + 1, f"{os.getloadavg()[0]:.1f}", f"{simulated[k].seconds:.1f}",
                f"{record.seconds:.1f}",
                f"{expected:.2f}", f"{ratio:.2f}", f"{ratio / expected:.2f}",
                f"{simulated[k].all_idle_share:.0%}, {record.all_idle_share:.0%}",
                f"{simulated[k].mean_age:.2f}, {record.mean_age:.2f}",
            ]  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
