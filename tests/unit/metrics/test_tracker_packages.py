"""W&B, MLflow and trackio for real, offline; each in a process of its own.

`make test-trackers` installs them.
"""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cr3t-Va1ue.9"
ROWS = [
    {
        "prompt": "1+1=",
        "response": f"2 {SECRET}",
        "label": "2",
        "reward": 1.0,
        "response_length": 2,
        "step": 1,
    }
]
RUN = """
import json, sys
from pathlib import Path
from megatron_rl.config import load_config, plain_values
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.metrics.trackers import TrackedRun
from megatron_rl.metrics.trackers.registry import Trackers
from megatron_rl.records.packed import StepResult
from megatron_rl.trainer.reporter import Reporter, send_samples
from megatron_rl.metrics.console import Console

name, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
cfg = load_config(None, ["--model.path", "m", "--data.train", "t",
    "--run.dir", str(folder.parent), "--run.name", folder.name,
    "--track.to", name, "--track.mode", "offline",
    "--track.project", "tests", "--track.close_seconds", "60",
    "--rollout.server_args", "--hf-token", "s3cr3t-Va1ue.9"])
run = TrackedRun(cfg.run.name, cfg.run_dir, "tests", mode="offline", config=plain_values(cfg),
    versions={"git": "abc"})
trackers = Trackers(cfg.track, run, print)
with Sinks(cfg.run_dir, trackers) as sinks:
    sinks.write(StepResult(first - 1, 0, {"eval/heldout/avg@4": 0.25}))
    for step in range(first, first + 3):
        norm = float("nan") if step == 1 else 1.0
        metrics = {"rollout/reward_mean": step / 8, "optim/grad_norm": norm}
        sinks.write(StepResult(step, step, metrics, {"routing/flip_rate": [0.5, step / 8]}))
    Reporter(cfg, Console(enabled=True, lines=LogLines("json")), sinks).finish()
print("failures", json.dumps(trackers.failures))
"""


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: pip install '.[{package}]', or make test-trackers"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def start(name: str, folder: Path, first: int = 0) -> None:
    """Train three steps from `first` in a process and finish, without a network or an account."""
    folder.mkdir(exist_ok=True)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    env = {
        each: value
        for each, value in os.environ.items()
        if not each.startswith(("WANDB", "MLFLOW", "TRACKIO"))
    }
    env |= {
        "TRACKIO_DIR": str(folder / "trackio"),
        "SOME_API_KEY": SECRET,
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    # nothing listens there
    env |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-W", "ignore", "-c", RUN, name, str(folder), str(first)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, last = done.stdout.splitlines()
    assert last == f'failures {{"{name}": 0}}', done.stdout + done.stderr
    assert [json.loads(line)["event"] for line in lines] == ["log", "summary"], (
        "standard output has only lines of ours"
    )


def without_secret(folder: Path, *but: str) -> None:
    """No file that the tracker wrote holds the secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in but]
    assert files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@needs("mlflow")
def test_mlflow(tmp_path):
    from mlflow import MlflowClient

    folder = tmp_path / "a"
    start("mlflow", folder)
    start("mlflow", folder, first=3)  # resumed: the same run
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert json.loads((folder / "trackers.json").read_text()) == {"mlflow": run.info.run_id}
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert sorted((each.step, each.value) for each in history) == [
        (step + 1, step / 8) for step in range(6)
    ]
    assert {
        "eval/heldout/avg_at_4",
        "routing/flip_rate/layer_01",
        "optim/grad_norm",
    } <= run.data.metrics.keys()
    assert run.data.params["track.project"] == "tests" and run.data.tags["version.git"] == "abc"
    assert "***" in run.data.params["rollout.server_args"]
    names = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "samples", "report.html", "report.png"} <= names
    table = next((folder / "mlflow").rglob("Best_responses_*.json"))
    assert json.loads(table.read_text())["data"][0][:2] == ["1+1=", "2 ***"]
    without_secret(folder, "rollouts.jsonl")


@needs("trackio")
def test_trackio(tmp_path):
    folder = tmp_path / "a"
    start("trackio", folder)
    start("trackio", folder, first=3)
    (database,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(database) as db:
        rows = list(db.execute("select run_name, step, metrics from metrics order by step, id"))
        (config,) = set(db.execute("select config from configs"))
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert {run for run, _, _ in rows} == {
        json.loads((folder / "trackers.json").read_text())["trackio"]
    }
    rewards = [
        (step, values["rollout/reward_mean"])
        for step, values in found
        if "rollout/reward_mean" in values
    ]
    assert rewards == [(step + 1, step / 8) for step in range(6)]
    assert any("eval/heldout/avg@4" in values for _, values in found)
    assert any("routing/flip_rate/layer_01" in values for _, values in found)
    tables = [
        values["samples/Best responses"]
        for _, values in found
        if "samples/Best responses" in values
    ]
    assert "2 ***" in json.dumps(tables)
    assert json.loads(config[0])["track"]["project"] == "tests"
    assert list((folder / "trackio").rglob("report.html"))
    without_secret(folder, "rollouts.jsonl")


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format in blocks of 32 KiB, after a header of 7
    bytes.
    """
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or its last part
            yield record
            record = b""


@needs("wandb")
def test_wandb(tmp_path):
    from wandb.proto import wandb_internal_pb2

    folder = tmp_path / "a"
    start("wandb", folder)
    start("wandb", folder, first=3)
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    run_id = json.loads((folder / "trackers.json").read_text())["wandb"]
    assert len(files) == 2 and {path.name for path in files} == {f"run-{run_id}.wandb"}, (
        "both continue one run"
    )
    history, config = [], {}
    for path in files:
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                history.append(
                    {
                        ".".join(item.nested_key) or item.key: item.value_json
                        for item in record.history.item
                    }
                )
            elif kind == "run":
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
                assert (record.run.display_name, record.run.project) == ("a", "tests")
    rewards = [
        (row["step"], row["rollout/reward_mean"]) for row in history if "rollout/reward_mean" in row
    ]
    assert [(int(step), float(reward)) for step, reward in rewards] == [
        (step + 1, step / 8) for step in range(6)
    ]
    names = set().union(*history)
    assert [
        row["routing/flip_rate._type"] for row in history if "routing/flip_rate._type" in row
    ] == ['"histogram"'] * 6
    assert any(name.startswith("samples/Best responses") for name in names)
    assert any(name.startswith("report") for name in names)
    assert config["track"]["project"] == "tests" and config["versions"] == {"git": "abc"}
    tables = [
        json.loads(path.read_text())["data"] for path in folder.rglob("*Best responses*.table.json")
    ]
    assert tables[0][0][:2] == ["1+1=", "2 ***"]
    without_secret(folder, "rollouts.jsonl")


@needs("wandb")
def test_wandb_without_a_network_stops_nothing(tmp_path):
    """Online, with a key and an address that nothing answers at: the run ends in time and says it
    once.
    """
    code = RUN.replace('"offline"', '"online"').replace('"60"', '"3"')
    code += (
        "from megatron_rl.metrics.trackers.background import exit_if_tracker_hangs; import time;"
        " print('end', time.time()); exit_if_tracker_hangs(0)"
    )
    env = os.environ | {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "4",
        "HOME": str(tmp_path),
    }
    env |= {"PYTHONPATH": str(ROOT)}
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", code, "wandb", str(tmp_path / "a"), "0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr[-3000:]
    assert ended - float(done.stdout.split()[-1]) < 10, (
        "its hook at the end of the process takes 18 s"
    )
    assert done.stdout.count("WARNING tracker wandb") == 1, done.stdout
    assert (tmp_path / "a/report.html").is_file() and "a" * 40 not in done.stdout
