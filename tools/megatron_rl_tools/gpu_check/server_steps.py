"""Steps with a real SGLang server: weight sync, the demo."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config import Config
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.parity import ParityError, ParityReport, compare
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from megatron_rl_tools.gpu_check.material import QWEN3_MOE, check_step_config, engine_of
from megatron_rl_tools.gpu_check.result import Findings, NotPossible, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace
from megatron_rl_tools.make_tiny_moe import make_tiny_moe
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples" / "tiny_cpu" / "demo.toml"
SHARED_GPU = ("--mem-fraction-static", "0.4")
"""Options of a server that shares its GPU with the trainer."""
HEAD_DIM = 64
"""Size of the heads of the demo's model on a GPU.  SGLang's kernels fail at 16, the CPU's."""
PROMPTS, SAMPLES, RESPONSE = 8, 4, 32


def weight_sync(place: StepPlace) -> StepOutcome:
    """Start a server with other weights than the trainer's: the parity check must fail before the
    sync, and pass after it.
    """
    version, findings = sglang_version(place), Findings()
    paths = [place.folder / "served", place.folder / "trained"]
    for seed, path in enumerate(paths):
        path.mkdir()
        write_random_checkpoint(QWEN3_MOE, path, seed=seed, dtype=torch.bfloat16)
    served, trained = paths
    cfg = check_step_config(
        trained,
        place.device,
        rollout=server_rollout_settings(place),
        replay={"mode": "none", "measure": True},
    )
    log = place.folder / "server.log"
    with launch_server(
        served, cfg.rollout, device=place.device, log_path=log, seed=0, want_routes=True
    ) as server:
        with engine_of(cfg) as engine:
            pusher = WeightPusher(
                ServerAccess([server.url], 300.0),
                PushedWeights(trained, torch.bfloat16),
                TransportSettings(
                    "colocated",
                    bucket_mb=64,
                    device=engine.parallel.device,
                    disk_dir=place.folder / "disk",
                ),
            )
            before = parity(engine, server.url, cfg, 0)
            pusher.push(lambda: engine.export_parts(1), 1)  # makes connections, not counted
            report = pusher.push(lambda: engine.export_parts(1), 2)
            after = parity(engine, server.url, cfg, 2)
            pusher.close()
    limits = parity_limits(cfg, "bfloat16")
    findings.figures = {
        "sglang": version,
        "seconds": report.seconds,
        "MiB": report.num_bytes / 2**20,
        "buckets": report.num_buckets,
        "log-prob difference": {
            "before": before.logprob_diff_mean,
            "after": after.logprob_diff_mean,
        },
        "expert overlap": {"before": before.expert_overlap, "after": after.expert_overlap},
    }
    findings.check(
        not passes(before, cfg), "the parity check passed although the server had other weights"
    )
    findings.check(passes(after, cfg), f"after the weight sync: {after.line(limits)}")
    return findings.outcome


def parity(engine: Engine, url: str, cfg: Config, version: int) -> ParityReport:
    rng = np.random.default_rng(version)
    ids = rng.integers(2, engine.spec.vocab_size, (PROMPTS, 16)).tolist()
    prompts = [Prompt(f"p{index}", "", tuple(row), "") for index, row in enumerate(ids)]
    client = RolloutClient([url], cfg.rollout, SampleRules(engine.spec, True))
    groups = client.generate(
        prompts,
        SAMPLES,
        temperature=1.0,
        max_tokens=RESPONSE,
        stop_token_ids=(),
        policy_version=version,
    )
    return compare(engine, groups, cfg)


def passes(report: ParityReport, cfg: Config) -> bool:
    try:
        report.check(parity_limits(cfg, "bfloat16"), print)
    except ParityError as error:
        print(error)
        return False
    return True


def demo(place: StepPlace) -> StepOutcome:
    """Run the demo on one rank, with its server on the same device."""
    sglang_version(place)
    if not DEMO.is_file():
        raise NotPossible(f"{DEMO} is missing: the demo needs a checkout of the repository")
    findings, model = Findings(), place.folder / "model"
    make_tiny_moe(model, head_dim=HEAD_DIM)
    settings = {
        "run.dir": place.folder / "runs",
        "run.device": place.device,
        "run.num_steps": 2 if place.quick else 20,
        "model.path": model,
        "model.dtype": "bfloat16",
        "data.train": model / "train.jsonl",
        "eval.sets.heldout": model / "heldout.jsonl",
        "parallel.ep": 1,
        "rollout.weight_sync": "colocated",
        "rollout.python": place.server_python,
    }
    if place.quick:
        settings |= {"run.prompts_per_step": 16, "eval.samples": 1}
    overrides = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    if place.device == "cuda":
        overrides += ["--rollout.server_args", *SHARED_GPU]
    command = [sys.executable, "-m", "megatron_rl.train", "--config", str(DEMO), *overrides]
    status = subprocess.run(command, cwd=ROOT).returncode
    findings.check(status == 0, f"the demo ended with exit status {status}")
    file = place.folder / "runs" / "demo" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_bytes().splitlines()] if file.is_file() else []
    steps = [row for row in rows if "train/loss" in row]
    findings.check(
        len(steps) == settings["run.num_steps"],
        f"{len(steps)} of {settings['run.num_steps']} steps",
    )
    for row in steps:
        findings.check(
            math.isfinite(row["train/loss"]), f"step {row['step']}: the loss is {row['train/loss']}"
        )
        unequal = row["routing/replayed_mismatch"]
        findings.check(
            unequal == 0,
            f"step {row['step']}: {unequal:.2%} of replayed experts differ from the server's",
        )
    if steps:
        names = (
            "rollout/reward_mean",
            "train/logratio_abs_mean",
            "routing/router_mismatch",
            "time/step",
            "time/weight_sync",
        )
        findings.figures = {
            name: {"first": steps[0].get(name), "last": steps[-1].get(name)} for name in names
        }
    return findings.outcome


def server_rollout_settings(place: StepPlace) -> dict[str, object]:
    args = SHARED_GPU if place.device == "cuda" else ()
    return {
        "dtype": "bfloat16",
        "max_total_tokens": 8192,
        "max_running_requests": 32,
        "weight_sync": "colocated",
        "python": str(place.server_python),
        "server_args": args,
        "max_response_tokens": RESPONSE,
    }


def sglang_version(place: StepPlace) -> str:
    """Return SGLang's version in the servers' environment.  Raises NotPossible if it has none."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    command = [str(place.server_python), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotPossible(
            f"{place.server_python} has no SGLang; name the interpreter that has: --server-python"
        )
    return done.stdout.strip()
