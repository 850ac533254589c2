"""A run of two ranks that samples two steps ahead from servers of its own (token_server.py).

A replica samples one prompt at a time, in their order: so a step's groups, and the weights of a
run, do not depend on when weights change, servers die or the run is killed.  The versions of the
tokens do, and are checked.
"""

import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_rl.config import load_config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from tests.fake_teacher import expected_logprobs, top_of
from tests.faults.samples import SPEC
from tests.saved_run import GROUP, PROMPTS

STALENESS = 2
SERVERS = 2
SERVER = "tests.token_server"
TAUGHT, TAUGHT_TOP, IN_TURNS = TEACHER_WAYS = "taught", "taught top k", "taught, releasing memory"
"""Runs with a teacher beside the rewards: two steps ahead, without and with its most probable
tokens, and a synchronous one whose teacher has memory only while it scores."""
TOP_K = 3
ROOT = Path(__file__).resolve().parents[1]


def make_prompts(work: Path, steps: int) -> None:
    """`work`/train.jsonl: every prompt of the run is another one.

    `work`/teacher: a checkpoint without weights.  `work`/server: started in place of Python for
    SGLang.
    """
    (work / "teacher").mkdir()
    for file in (work / "moe").glob("*.json"):
        shutil.copy(file, work / "teacher")
    rows = [
        {"id": str(number), "prompt": f"{number}+1=", "label": "0"}
        for number in range((steps + STALENESS) * PROMPTS)
    ]
    (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = work / "server"
    script.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.token_server "$@"\n')
    script.chmod(0o755)


def sections(work: Path, weight_update: str | None) -> dict[str, dict[str, Any]]:
    """What the configuration has beside that of a run on saved rollouts.

    weight_update: None for a synchronous run; those of TEACHER_WAYS drain.
    """
    is_taught = weight_update in TEACHER_WAYS
    ahead: dict[str, Any] = {}
    if weight_update not in (None, IN_TURNS):
        update = "drain" if is_taught else weight_update
        ahead = {"max_staleness": STALENESS, "weight_update": update}
    teacher: dict[str, Any] = {"path": str(work / "teacher"), "beta": 0.1}
    teacher["release_memory"] = weight_update == IN_TURNS
    top = {"teacher_form": "reverse", "teacher_top_k": TOP_K}
    return {
        "teachers": {"near": teacher} if is_taught else {},
        "loss": top if weight_update == TAUGHT_TOP else {},
        "data": {"shuffle": False},
        "reward": {"function": "tests.e2e.rewards:mean_code", "timeout_seconds": 60.0},
        "rollout": {
            "max_concurrency": 1, "max_response_tokens": 8, "save_tensors": is_taught, **ahead,
            "python": str(work / "server"), "num_servers": SERVERS, "max_server_restarts": 100,
            "weight_sync": "disk",
            "verify_push": "version", "parity_warn_logprob_diff": 1e3,
            "parity_max_logprob_diff": 1e3,
            "parity_warn_expert_overlap": 0.0, "parity_min_expert_overlap": 0.0,
        },
    }  # fmt: skip


def servers(ranks: list[int]) -> list[psutil.Process]:
    """The servers that these ranks sample from and that live."""
    children = [
        child
        for rank in ranks
        if psutil.pid_exists(rank)
        for child in psutil.Process(rank).children()
    ]
    lines = [(child, " ".join(child.cmdline())) for child in children]
    return [child for child, line in lines if SERVER in line and "/teacher --host" not in line]


def left_behind(work: Path) -> list[str]:
    """Command lines of servers of runs in `work` that live."""
    lines = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in lines if SERVER in line and str(work) in line]


def check_rollouts(run: Path, steps: int) -> dict[int, int]:
    """Every attempt at a step had the step's own prompts, and the last one all of them, each
    response once; no token is too old.

    Returns age -> tokens.
    """
    ages: dict[int, int] = defaultdict(int)
    folder = RunFolder(run)
    for replica in range(2):
        attempts: dict[int, list[list[str]]] = defaultdict(list)
        files = [folder.lines_of("rollouts", step, replica) for step in range(1, steps + 1)]
        for line in map(json.loads, "".join(file.read_text() for file in files).splitlines()):
            step = line["step"]
            if line["id"] == expected(step, replica)[0]:
                attempts[step].append([])
            attempts[step][-1].append(line["id"])
            for version, tokens in line["policy_versions"]:
                ages[step - 1 - version] += tokens
        assert sorted(attempts) == list(range(1, steps + 1))
        for step, found in attempts.items():
            ids = expected(step, replica)
            assert found[-1] == ids and all(each == ids[: len(each)] for each in found), (
                f"step {step}: {found}"
            )
    assert set(ages) <= set(range(STALENESS + 1)), dict(ages)
    return dict(sorted(ages.items()))


def check_teacher(run: Path, steps: int) -> int:
    """Every token of every step has its teacher's number, and its most probable tokens where the
    run asked for them.

    Returns how many tokens that are.
    """
    names = ("--run.name", "other", "--run.num_steps", str(steps))
    cfg = load_config(run / "config.toml", names, of_a_run=True)
    saved, tokens, top_k = SavedSteps(run, cfg, SPEC), 0, cfg.loss.teacher_top_k
    for rollout in (
        r for step in range(steps) for g in saved.groups(step, 0, 1) for r in g.rollouts
    ):
        np.testing.assert_array_equal(
            rollout.teacher_logprobs, expected_logprobs(rollout.tokens, rollout.sampled)
        )
        if top_k:
            ids, _ = top_of(rollout.tokens.tolist(), rollout.sampled.tolist(), top_k)
            named = rollout.teacher_top.sets.ids().reshape(-1, top_k)
            np.testing.assert_array_equal(named, np.sort(ids, axis=1))
        tokens += len(rollout.sampled)
    return tokens


def expected(step: int, replica: int) -> list[str]:
    """Ids of the responses of a step (from 1) on one of two replicas."""
    first = PROMPTS * (step - 1)
    return [
        f"{prompt}/{place}"
        for prompt in range(first + replica, first + PROMPTS, 2)
        for place in range(GROUP)
    ]
