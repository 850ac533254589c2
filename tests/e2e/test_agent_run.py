"""A run whose rollouts have two turns, as a user starts it: what it writes, and what its checks say
of it.
"""

import asyncio
import json
import os
import random
import re
import signal
import time

import psutil
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from megatron_rl.checkpoint.folder import latest_checkpoint
from megatron_rl.checkpoint.manifest import damage, read_manifest
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
from megatron_rl.rollout.saved.rollout_tensors import read_tensors
from megatron_rl_tools.check_rollouts.check_rollouts import check_run
from megatron_rl_tools.check_rollouts.model_sizes import open_model
from tests.e2e.test_train import make_material, metrics_of, start, wait_for

FUNCTION = (
    "--agent.function",
    "examples.agents.two_attempts:rollout",
    "--rollout.max_response_tokens",
    "24",
)


@pytest.mark.slow
def test_a_run_of_two_attempts(tmp_path):
    material = make_material(tmp_path, num_hidden_layers=3)
    process = start(
        material, tmp_path, steps=2, extra=(*FUNCTION, "--rollout.save_tensors", "true")
    )
    output = tmp_path / "output.txt"
    assert process.wait(400) == 0, output.read_text()
    run = tmp_path / "runs/run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "rollout/turns_mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert 1.0 < row["rollout/turns_mean"] <= 2.0 == row["rollout/turns_max"]
        assert (
            row["episode/attempts"] == row["rollout/turns_mean"]
            and row["rollout/environment_length_mean"] > 0
        )
        assert (
            row["rollout/environment_seconds_mean"]
            <= row["rollout/environment_seconds_max"]
            < row["time/step"]
        )
        # fp32 on both sides: over both turns the trainer computes what the server sampled
        assert row["train/logratio_abs_mean"] <= 1e-4 and row["routing/replayed_mismatch"] == 0
        assert row["routing/router_mismatch"] <= 0.001 or row["routing/flip_margin_max"] < 1e-4
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    records = [record for file in files for record in read_rollouts(file)]
    tensors = read_tensors(run, 1)
    several = [record for record in records if record.step == 1 and record.environment_length]
    assert several
    for record in several:
        tokens = tensors[f"{record.id}:tokens"]
        ((first, end),) = tensors[f"{record.id}:environment"]
        # the question again
        assert tokens[first:end].tolist() == tokens[: record.prompt_length].tolist()
        assert (
            len(tokens) == record.prompt_length + record.response_length + record.environment_length
        )
        assert record.reward in (0.0, 0.5)
    report = check_run(run, open_model(material / "moe", "bfloat16"), step=1)
    assert not report.findings, report.findings


async def patient(session, prompt):
    """Three turns with a tool that takes its time; what it answers follows from the turn."""
    for _ in range(2):
        turn = await session.generate(max_tokens=5)
        await asyncio.sleep(0.05 * (1 + sum(turn.token_ids) % 10))
        session.observe(f"{sum(turn.token_ids) % 10}=")
    await session.generate(max_tokens=5)
    return session.finish()


def unfinished_episodes(checkpoint):
    """(id, tokens) of the episodes that were cut short, of at least one complete turn.

    Without those of a prompt that was drawn twice: the run may end before it trains on the second
    group of the same ids.
    """
    found, ids = [], []
    for path in checkpoint.glob("rollouts_*.safetensors"):
        with safe_open(path, "numpy") as file:
            for place, group in enumerate(json.loads(file.metadata()["groups"])):
                for each in group["responses"]:
                    ids.append(each["id"])
                    if each["finish_reason"] == "abort" and each.get("turns"):
                        found.append(
                            (
                                each["id"],
                                file.get_tensor(f"{place}/{each['index']}:tokens").tolist(),
                            )
                        )
    return [(id_, tokens) for id_, tokens in found if ids.count(id_) == 1]


def trained_on(run, step):
    """(id, tokens) of the rollouts of a step, of all replicas."""
    files = run.glob(f"rollouts/step_{step:06d}*.safetensors")
    tensors = [each for file in files for each in load_file(file).items()]
    return [
        (name.removesuffix(":tokens"), each.tolist())
        for name, each in tensors
        if name.endswith(":tokens")
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_episodes_in_flight_continue_after_a_signal(tmp_path):
    """One step ahead, over-sampled by half; stopped by SIGTERM twice, and resumed from the
    checkpoint.
    """
    material = make_material(tmp_path, num_hidden_layers=3)
    function = (
        "--agent.function",
        "tests.e2e.test_agent_run:patient",
        "--rollout.max_response_tokens",
        "48",
    )
    ahead = (
        "--rollout.max_staleness",
        "2",
        "--rollout.weight_update",
        "abort",
        "--rollout.max_concurrency",
        "2",
    )
    partial = (*ahead, "--rollout.partial", "resume", "--rollout.over_sample", "0.5")
    extra = (*function, *partial, "--rollout.save_tensors", "true", "--optim.schedule", "constant")
    run, done, kept = tmp_path / "runs/run", 0, {}
    for _ in range(2):
        process = start(material, tmp_path, steps=10_000, extra=extra)
        wait_for(process, tmp_path, rf"step\s+{done + 2}/")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(600) != 0
        folder = latest_checkpoint(run / "checkpoints")
        done = int(folder.name[5:11])
        kept[done] = unfinished_episodes(folder)
    assert any(kept.values()), "no episode was in flight"
    process = start(material, tmp_path, steps=done + 2, extra=extra)
    output = tmp_path / "output.txt"
    assert process.wait(1800) == 0, output.read_text()
    trained = {step: trained_on(run, step) for step in range(1, done + 3)}
    number = 0
    for saved, episodes in kept.items():
        later = [rollout for step in range(saved + 1, done + 3) for rollout in trained[step]]
        for id_, tokens in episodes:
            # a prompt is drawn again, perhaps in one step
            found = [whole for name, whole in later if name == id_]
            assert not found or any(whole[: len(tokens)] == tokens for whole in found), (
                f"{id_} was sampled again"
            )
            number += bool(found)
    assert number
    assert check_run(run, open_model(material / "moe", "bfloat16"), step=done + 1).findings == ()
    steps = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert (
        all(row["routing/replayed_mismatch"] == 0 for row in steps)
        and len({row["step"] for row in steps}) == done + 2
    )
    assert steps[-1]["rollout/resumed_episodes_total"] > 0
    assert all(
        row["rollout/diverged_episodes_total"] == row["rollout/lost_samples_total"] == 0
        for row in steps
    )


KILLS = 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_loses_nothing(tmp_path):
    """SIGKILL to a rank, three times, at random points of steps with episodes in flight.

    Sampling is random; but the run must be, bit for bit, one that was never disturbed and trained
    on the rollouts it saved.
    """
    material = make_material(tmp_path, num_hidden_layers=3)
    rng, run, done = random.Random(0), tmp_path / "runs/run", 0
    same = (
        "--optim.schedule",
        "constant",
        "--checkpoint.every",
        "1",
        "--rollout.save_tensors",
        "true",
    )
    function = (
        "--agent.function",
        "tests.e2e.test_agent_run:patient",
        "--rollout.max_response_tokens",
        "48",
    )
    ahead = (
        "--rollout.max_staleness",
        "2",
        "--rollout.weight_update",
        "abort",
        "--rollout.max_concurrency",
        "2",
    )
    partial = (*ahead, "--rollout.partial", "resume", "--rollout.over_sample", "0.5")
    for _ in range(KILLS):
        process = start(material, tmp_path, steps=10_000, extra=(*same, *function, *partial))
        text = wait_for(process, tmp_path, rf"checkpoint \S+/step_0*{done + 1} ")
        time.sleep(rng.uniform(0.0, 6.0))
        os.kill(rng.choice(psutil.Process(process.pid).children()).pid, signal.SIGKILL)
        assert process.wait(600) != 0
        folder = latest_checkpoint(run / "checkpoints")
        assert not damage(folder, read_manifest(folder))
        saved, done = done, int(folder.name[5:11])
        text = (tmp_path / "output.txt").read_text()
        assert done == max(map(int, re.findall(r"checkpoint \S+/step_(\d+) ", text))) > saved, text
    process = start(material, tmp_path, steps=done + 2, extra=(*same, *function, *partial))
    assert process.wait(1800) == 0, (tmp_path / "output.txt").read_text()
    rows = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert {row["step"] for row in rows} == set(range(1, done + 3))
    assert rows[-1]["rollout/resumed_episodes_total"] > 0 == rows[-1]["rollout/lost_samples_total"]
    again = ("--run.name", "undisturbed", "--from-rollouts", str(run))
    process = start(material, tmp_path, steps=done + 2, extra=(*same, *function, *partial, *again))
    assert process.wait(1800) == 0, (tmp_path / "output.txt").read_text()
    ends = [
        latest_checkpoint(tmp_path / f"runs/{name}/checkpoints") for name in ("run", "undisturbed")
    ]
    assert [int(end.name[5:11]) for end in ends] == [done + 2] * 2
    files = [
        {n: d for n, d in read_manifest(end).files.items() if n.endswith(".distcp")} for end in ends
    ]
    assert len(files[0]) >= 2 and files[0] == files[1]
