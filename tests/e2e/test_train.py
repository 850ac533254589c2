"""The main job as a user runs it: torchrun, two Megatron ranks, a real SGLang server, and the files
that they leave.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.checkpoint.folder import latest_checkpoint
from megatron_rl.launch.status import read_status
from megatron_rl.metrics.left_out import entry_of
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
from megatron_rl_tools.check_rollouts.check_rollouts import check_run
from megatron_rl_tools.tiny_text import make_tokenizer
from megatron_rl_tools.top import top
from tests.e2e import runs
from tests.tiny import random_checkpoint

MAX_SAMPLING_ROUNDS = 4

CONFIG = """
[run]
name = "run"
dir = "{folder}/runs"
device = "cpu"
num_steps = {steps}
prompts_per_step = 8
group_size = 4
num_mini_batches = 2
max_tokens_per_micro_batch = 128
collective_timeout_minutes = 6  # servers of a busy machine have taken three minutes to start
[model]
path = "{folder}/moe"
dtype = "float32"
recompute = "full"
[data]
train = "{folder}/train.jsonl"
chat_template = false
[rollout]
dtype = "float32"
max_response_tokens = 6
max_total_tokens = 4096
max_running_requests = 32
request_timeout_seconds = 30
max_retries = 1
weight_sync = "{push}"
[reward]
function = "tests.e2e.rewards:parity"
[optim]
lr = 1e-3
distributed = false
[parallel]
ep = 2
[eval]
samples = 2
[eval.sets]
held = "{folder}/held.jsonl"
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return make_material(tmp_path_factory.mktemp("train"), num_hidden_layers=3)


def make_material(folder: Path, **shape: int) -> Path:
    """A random tiny MoE with a character tokenizer, and prompts whose answers are single digits."""
    tokenizer = make_tokenizer()
    random_checkpoint(
        folder / "moe", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape
    )
    tokenizer.save_pretrained(folder / "moe")
    for name, first in (("train", 0), ("held", 50)):
        rows = [{"prompt": f"{n}+1=", "label": str((n + 1) % 10)} for n in range(first, first + 40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(
    material: Path,
    work: Path,
    *,
    steps: int,
    push: str = "distributed",
    extra: tuple[str, ...] = (),
) -> subprocess.Popen:
    config = work / "config.toml"
    text = CONFIG.format(folder=material, steps=steps, push=push).replace(
        f"{material}/runs", f"{work}/runs"
    )
    config.write_text(text)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += ["-m", "megatron_rl.train", "--config", str(config), *extra]
    with open(work / "output.txt", "ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
    runs.STARTED.append(process)  # conftest.py ends what a failed test leaves running
    return process


def wait_for(process: subprocess.Popen, work: Path, pattern: str, timeout: float = 360) -> str:
    """The output so far, once `pattern` is in it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        text = (work / "output.txt").read_text(errors="replace")
        if re.search(pattern, text):
            return text
        assert process.poll() is None, text
        time.sleep(0.2)
    raise AssertionError(f"no {pattern!r} within {timeout} s:\n{text}")


def left_behind(work: Path) -> list[str]:
    """Command lines of launchers and ranks of this run that are still there; its servers:
    server_processes.
    """
    lines = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in lines if str(work) in line]


def server_processes(material: Path) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if f"--model-path {material}/moe" in " ".join(p.info["cmdline"] or [])
    ]


def weights_in(folder: Path) -> dict:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def metrics_of(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "runs/run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("push", ["distributed", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_run_from_start_to_report_its_resume_and_ctrl_c(material, tmp_path, push, capsys):
    rounds = ("--batch.max_sampling_rounds", str(MAX_SAMPLING_ROUNDS))
    dapo = (
        "--batch.dynamic_sampling",
        *rounds,
        "--batch.overlong_cache",
        "3",
        "--log-format",
        "json",
    )
    dapo = dapo if push == "disk" else ()
    process = start(material, tmp_path, steps=3, push=push, extra=dapo)
    assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    run = tmp_path / "runs/run"
    rows = metrics_of(tmp_path)
    steps = [row for row in rows if "train/loss" in row]
    evals = [row for row in rows if "eval/held/avg@2" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and len(evals) == 2
    for row in steps:  # fp32 on both sides, after every push: the same model to rounding
        assert row["train/logratio_abs_mean"] <= 1e-4
        assert row["routing/router_mismatch"] <= 0.001 or row["routing/flip_margin_max"] < 1e-4
        assert row["routing/replayed_mismatch"] == 0
    versions = {}
    for file in sorted(run.glob("rollouts/*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            versions.setdefault(record["step"], set()).update(
                version for version, _ in record["policy_versions"]
            )
    assert versions == {1: {0}, 2: {1}, 3: {2}}, (
        "every step must sample from the weights of the step before"
    )
    assert [(row["policy_version"], row["rollout/staleness_max"]) for row in steps] == [
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert (
        json.loads((run / "checkpoints/step_000003/state.json").read_text())["progress"][
            "policy_version"
        ]
        == 3
    )
    trained, initial = weights_in(run / "hf"), weights_in(material / "moe")
    assert trained.keys() == initial.keys()
    assert any(not trained[name].equal(initial[name]) for name in initial)
    for name in (
        "config.toml",
        "report.html",
        "report.png",
        "checkpoints/step_000003/metadata.json",
    ):
        assert (run / name).exists(), name
    assert list(run.rglob("events.out.tfevents*"))
    assert not server_processes(material) and not left_behind(tmp_path)
    status = read_status(run)
    assert (status.state, status.step, status.num_steps, len(status.ranks)) == ("finished", 3, 3, 2)
    assert [row["track/tensorboard_failures_total"] for row in steps] == [0, 0, 0]
    assert not [
        name for row in steps for name in row if name.endswith("_total") and entry_of(name) is None
    ]
    if push == "disk":
        check_json_lines((tmp_path / "output.txt").read_text(), steps)
        for row in steps:
            assert (
                -1 <= row["rollout/length_penalty_mean"] < 0 and row["rollout/sampling_rounds"] >= 1
            )
            gave_up = (
                row["rollout/sampling_rounds"] == 1 + MAX_SAMPLING_ROUNDS
            )  # a random model seldom earns two rewards
            assert row["rollout/zero_advantage_groups_frac"] == 0 or gave_up, (
                "a group without advantage was trained on"
            )
        return
    (tmp_path / "output.txt").unlink()
    process = start(material, tmp_path, steps=10_000)
    assert "resumed from" in wait_for(process, tmp_path, r"step\s+4/")
    interrupt(process, material, tmp_path, capsys)
    resumed = [row["step"] for row in metrics_of(tmp_path) if "train/loss" in row]
    assert resumed == list(range(1, len(resumed) + 1)) and len(resumed) >= 4


def check_json_lines(text: str, steps: list[dict]) -> None:
    """Every line of ours is one object: what is left is of libraries and of torchrun."""
    lines = text.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [
        line
        for line in lines
        if re.match(r"(step|eval|server|parity|report|checkpoint|[0-9]+ steps)\b", line)
    ] == []
    found = [row for row in rows if row["event"] == "step"]
    assert [(row["step"], row["num_steps"]) for row in found] == [(1, 3), (2, 3), (3, 3)]
    assert all(len(row["text"]) <= 120 for row in found)
    names = ("rollout/reward_mean", "train/loss", "optim/grad_norm", "time/step")
    assert [[row["metrics"][name] for name in names] for row in found] == [
        [row[name] for name in names] for row in steps
    ]
    (summary,) = [row for row in rows if row["event"] == "summary"]
    assert (
        summary["steps"] == 3
        and summary["changed"]["eval/held/avg@2"]
        and "tensorboard --logdir" in summary["text"]
    )
    assert {row["event"] for row in rows} >= {"log", "step", "evaluation", "summary"}
    assert all({"time", "event", "text"} <= row.keys() for row in rows)


def interrupt(process: subprocess.Popen, material: Path, work: Path, capsys) -> None:
    """`top` shows the run, and Ctrl-C stops all of its processes."""
    run = work / "runs/run"
    shown, deadline = "", time.monotonic() + 120
    # status.json is of the last heartbeat
    while not re.match(r"run  running  step [1-9]\d*/10000  for \d:\d\d", shown):
        assert time.monotonic() < deadline, shown
        assert top.main([str(run), "--once"]) == 0
        shown = capsys.readouterr().out
    assert re.search(r"^0 .* GiB", shown, re.M) and re.search(r"^1 .* GiB", shown, re.M), (
        "both ranks"
    )
    assert re.search(
        r"^http://127\.0\.0\.1:\d+ .*v\d+ +[\d,]+ +\d+ +\d+ +\d+% +[\d.]+ GB", shown, re.M
    ), shown
    os.killpg(process.pid, signal.SIGINT)
    process.wait(150)
    deadline = time.monotonic() + 120
    while (server_processes(material) or left_behind(work)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not server_processes(material) and not left_behind(work)
    assert top.main([str(run)]) == 0, "no terminal: once"
    assert re.match(r"run  stopped  step [1-9]\d*/10000  \d{4}-", capsys.readouterr().out)


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_and_is_named(material, tmp_path):
    process = start(material, tmp_path, steps=10_000, extra=("--rollout.max_server_restarts", "0"))
    text = wait_for(process, tmp_path, r"step\s+2/")
    url = re.search(r"server (http://\S+?):? ", text).group(1)
    for server in server_processes(material):
        server.kill()
    assert process.wait(150) != 0
    text = (tmp_path / "output.txt").read_text()
    assert re.search(rf"(RolloutError|WeightPushError|ServerError): .*{re.escape(url)}", text), (
        text[-3000:]
    )
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_the_run_goes_on(material, tmp_path):
    process = start(material, tmp_path, steps=6)
    text = wait_for(process, tmp_path, r"step\s+2/")
    url = re.search(r"server (http://\S+?):? ", text).group(1)
    for server in server_processes(material):
        server.kill()
    assert process.wait(400) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    text = (tmp_path / "output.txt").read_text()
    assert f"restart 1 of at most 3 of server {url}" in text
    steps = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert (
        1 <= steps[-1]["rollout/server_restarts_total"] <= 3
    )  # a port of SGLang's may be taken by somebody else meanwhile
    assert steps[0]["rollout/server_restarts_total"] == 0
    assert all(row["train/logratio_abs_mean"] <= 1e-4 for row in steps), (
        "the replacement has the current weights"
    )
    assert not server_processes(material) and not left_behind(tmp_path)


def test_bad_input_stops_before_a_server_starts(material, tmp_path):
    """Prompts with a broken row: one line that names file and rule, exit 1."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+1="\n')
    process = start(material, tmp_path, steps=1, extra=("--data.train", str(broken)))
    assert process.wait(120) != 0
    text = (tmp_path / "output.txt").read_text()
    assert re.search(r"broken\.jsonl.*2", text)
    assert "starting 1 SGLang server" not in text


def ages_of(folder: Path) -> dict[int, set[int]]:
    """Step, from 1 -> how many pushes old its tokens were: step 1 is sampled from version 0."""
    ages: dict[int, set[int]] = {}
    for file in sorted(folder.glob("rollouts/*.jsonl")):
        for record in read_rollouts(file):
            newest = record.step - 1
            ages.setdefault(record.step, set()).update(
                newest - version for version, _ in record.policy_versions
            )
    return ages


@pytest.mark.slow
def test_a_run_samples_one_step_ahead(material, tmp_path):
    process = start(material, tmp_path, steps=3, extra=("--rollout.max_staleness", "1"))
    assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    assert ages_of(tmp_path / "runs/run") == {1: {0}, 2: {1}, 3: {1}}
    steps = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert [row["rollout/staleness_mean"] for row in steps] == [0, 1, 1]
    assert [row["rollout/mixed_versions_frac"] for row in steps] == [0, 0, 0]
    assert all(row["routing/replayed_mismatch"] == 0 for row in steps)
    assert steps[0]["train/logratio_abs_mean"] <= 1e-4 < steps[1]["train/logratio_abs_mean"], (
        "pi_old is newer than mu"
    )
    assert not server_processes(material) and not left_behind(tmp_path)


@pytest.mark.slow
def test_a_run_whose_weights_change_while_servers_sample(material, tmp_path):
    ahead = (
        "--rollout.max_staleness",
        "2",
        "--rollout.weight_update",
        "in_place",
        "--rollout.max_concurrency",
        "2",
    )
    saved = ("--rollout.max_response_tokens", "48", "--rollout.save_tensors")
    process = start(material, tmp_path, steps=6, extra=(*ahead, *saved))
    assert process.wait(400) == 0, (tmp_path / "output.txt").read_text()
    run = tmp_path / "runs/run"
    ages = ages_of(run)
    assert ages[1] == {0} and set().union(*ages.values()) <= {0, 1, 2}
    assert check_run(run, None).findings == ()
    steps = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert len(steps) == 6 and any(row["rollout/mixed_versions_frac"] > 0 for row in steps)
    assert all(
        row["routing/replayed_mismatch"] == 0 and row["rollout/staleness_max"] <= 2 for row in steps
    )
    assert (
        steps[-1]["rollout/lost_samples_total"] == steps[-1]["rollout/dropped_samples_total"] == 0
    )
    assert not server_processes(material) and not left_behind(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_cut_short_and_resumes(material, tmp_path):
    """One step ahead, over-sampled by half; stopped by SIGTERM, and resumed from the checkpoint and
    the rollouts in flight.
    """
    ahead = (
        "--rollout.max_staleness",
        "2",
        "--rollout.weight_update",
        "abort",
        "--rollout.max_concurrency",
        "2",
    )
    partial = (*ahead, "--rollout.partial", "resume", "--rollout.over_sample", "0.5")
    extra = (
        *partial,
        "--rollout.max_response_tokens",
        "48",
        "--rollout.save_tensors",
        "--optim.schedule",
        "constant",
    )
    process = start(material, tmp_path, steps=10_000, extra=extra)
    wait_for(process, tmp_path, r"step\s+2/")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) != 0
    run = tmp_path / "runs/run"
    folder = latest_checkpoint(run / "checkpoints")
    done, kept = int(folder.name[5:11]), whole_responses(folder)
    assert kept and (run / "checkpoints/stopped").exists()
    process = start(material, tmp_path, steps=done + 2, extra=extra)
    assert process.wait(400) == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert re.search(r"\d+ responses of \d+ groups in flight\n", text), text[-3000:]
    ages = ages_of(run)
    assert ages[1] == {0} and {0, 1} <= set().union(*ages.values()) <= {0, 1, 2}
    trained = [
        (record.step, record.prompt_id)
        for file in run.glob("rollouts/*.jsonl")
        for record in read_rollouts(file)
    ]
    assert len(set(trained)) == (done + 2) * 8 == len({prompt for _, prompt in trained}), (
        "a prompt was trained on twice"
    )
    again = {
        id_: tokens
        for step in (done + 1, done + 2)
        for id_, tokens in tokens_of(run, step).items()
        if id_ in kept
    }
    assert again and all(kept[id_] == tokens for id_, tokens in again.items()), (
        "in flight, and sampled again"
    )
    assert check_run(run, None).findings == ()
    steps = {row["step"]: row for row in metrics_of(tmp_path) if "train/loss" in row}
    assert sorted(steps) == list(range(1, done + 3))
    assert all(
        row["rollout/staleness_max"] <= 2 and row["routing/replayed_mismatch"] == 0
        for row in steps.values()
    )
    # on a busy machine the first weight syncs may come between two groups
    assert max(row["rollout/cut_samples_total"] for row in steps.values()) > 0
    assert all(row["rollout/lost_samples_total"] == 0 for row in steps.values())
    assert not server_processes(material) and not left_behind(tmp_path)


def whole_responses(checkpoint: Path) -> dict[str, list[int]]:
    """Id -> tokens of the whole responses in flight."""
    found = {}
    for path in checkpoint.glob("rollouts_*.safetensors"):
        with safe_open(path, "numpy") as file:
            for place, group in enumerate(json.loads(file.metadata()["groups"])):
                for each in group["responses"]:
                    if each["finish_reason"] != "abort":
                        found[each["id"]] = file.get_tensor(
                            f"{place}/{each['index']}:tokens"
                        ).tolist()
    return found


def tokens_of(run: Path, step: int) -> dict[str, list[int]]:
    files = run.glob(f"rollouts/step_{step:06d}*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {
        name.rsplit(":", 1)[0]: tensor.tolist()
        for name, tensor in tensors.items()
        if name.endswith(":tokens")
    }


def run_two_steps(material: Path, work: Path, name: str, *extra: str) -> str:
    """What a finished run of two steps printed."""
    process = start(material, work, steps=2, extra=("--run.name", name, *extra))
    assert process.wait(300) == 0, (work / "output.txt").read_text()
    text = (work / "output.txt").read_text()
    (work / "output.txt").unlink()
    return text


def step_rows(work: Path, name: str) -> list[dict]:
    rows = [
        json.loads(line)
        for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if "rollout/reward_mean" in row]


@pytest.mark.slow
def test_saved_rollouts_train_as_they_did_live_and_without_a_server(material, tmp_path):
    run_two_steps(material, tmp_path, "live", "--rollout.save_tensors")
    text = run_two_steps(
        material, tmp_path, "again", "--from-rollouts", str(tmp_path / "runs/live")
    )
    assert "no server" in text and "starting 1 SGLang server" not in text
    for live, again in zip(step_rows(tmp_path, "live"), step_rows(tmp_path, "again"), strict=True):
        groups = ("train/", "optim/", "routing/", "rollout/reward", "rollout/response")
        names = [name for name in live if name.startswith(groups)]
        assert {
            "train/loss",
            "optim/grad_norm",
            "routing/router_mismatch",
            "train/logratio_abs_mean",
        } <= set(names)
        assert [again[name] for name in names] == [live[name] for name in names], (
            "not the same bits"
        )
    trained, again = weights_in(tmp_path / "runs/live/hf"), weights_in(tmp_path / "runs/again/hf")
    assert all(again[name].equal(trained[name]) for name in trained)
    assert not server_processes(material) and not left_behind(tmp_path)


@pytest.mark.slow
def test_only_rollout_writes_what_can_be_trained_on(material, tmp_path):
    text = run_two_steps(material, tmp_path, "sampled", "--only", "rollout")
    assert "starting 1 SGLang server" in text
    rows, folder = step_rows(tmp_path, "sampled"), tmp_path / "runs/sampled"
    assert [(row["step"], row["policy_version"]) for row in rows] == [(1, 0), (2, 0)], (
        "weights must stay as they were"
    )
    assert not any(name.startswith(("train/", "optim/")) for row in rows for name in row)
    assert (
        len(list(folder.glob("rollouts/*.safetensors"))) == 4
        and not (folder / "checkpoints").exists()
    )
    run_two_steps(
        material,
        tmp_path,
        "trained",
        "--from-rollouts",
        str(folder),
        "--rollout.urls",
        "http://127.0.0.1:9",
    )
    first, second = step_rows(tmp_path, "trained")
    assert first["train/logratio_abs_mean"] <= 1e-4 and second["train/logratio_abs_mean"] > 1e-4, (
        "step 1 is off-policy"
    )
    assert first["rollout/reward_mean"] == rows[0]["rollout/reward_mean"]
    assert not server_processes(material) and not left_behind(tmp_path)


@pytest.mark.slow
def test_384_experts_sampled_shared_and_replayed(tmp_path):
    """Top-8 of 384 experts (as Kimi-K2; DeepSeek-V3 has 256): int16 ids from a real server to a
    replica of two ranks.
    """
    material = make_material(
        tmp_path / "material", num_hidden_layers=1, num_experts=384, num_experts_per_tok=8
    )
    layout = (
        "--parallel.tp",
        "2",
        "--parallel.ep",
        "2",
        "--parallel.etp",
        "1",
        "--checkpoint.export_hf",
        "false",
    )
    text = run_two_steps(
        material, tmp_path, "many", "--replay.mode", "R3", "--replay.measure", "true", *layout
    )
    assert "experts yes" in text
    first, second = step_rows(tmp_path, "many")
    assert first["routing/router_mismatch"] < 0.01 and first["train/logratio_abs_mean"] < 1e-4
    assert first["routing/replayed_mismatch"] == second["routing/replayed_mismatch"] == 0
    assert not server_processes(material) and not left_behind(tmp_path)
