"""The launcher's exit status for those of its ranks, which are small programs here."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.launch.exit_codes import BAD_CONFIG, REQUEUE, STALLED

ROOT = Path(__file__).resolve().parents[3]

RANK = """
import os, signal, sys, time
end, starts = sys.argv[1:]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
with open(starts, "a") as file:
    file.write(os.environ["RANK"] + "\\n")
if os.environ["RANK"] == "1":
    exec(end)
time.sleep(600)
"""

LAUNCH = """
import os, signal, sys, threading, time
from megatron_rl.launch.torchrun import main
rank, folder, *ends = sys.argv[1:]
def stop_when_started(starts):
    while not os.path.exists(starts) or len(open(starts).read().split()) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
for end in ends:
    if end == "pass":
        threading.Thread(target=stop_when_started, args=(folder + end,), daemon=True).start()
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    options += ["--signals-to-handle", "SIGTERM,SIGUSR1"]
    print("STATUS", main([*options, rank, end, folder + end]), flush=True)
"""

ENDS = {  # how rank 1 ends: exit status of the launcher, times it was started
    f"sys.exit({STALLED})": (STALLED, 2),
    f"sys.exit({REQUEUE})": (REQUEUE, 1),
    f"sys.exit({BAD_CONFIG})": (BAD_CONFIG, 1),
    "os.kill(os.getpid(), 9)": (128 + 9, 2),
    "pass": (REQUEUE, 1),  # the launcher gets SIGUSR1, passes it on, and the ranks save and exit
}


SLOW_RANK = """
import os, signal, sys, time
def save(*_):
    if os.environ["RANK"] == sys.argv[2]:
        time.sleep(600)  # it never ends by itself
    time.sleep(3)
    sys.exit(85)
signal.signal(signal.SIGUSR1, save)
with open(sys.argv[1], "a") as file:
    file.write(os.environ["RANK"] + os.environ["MEGATRON_RL_LAUNCHER"] + "\\n")
time.sleep(600)
"""

LAUNCH_SLOW = """
import os, signal, sys, threading, time
from megatron_rl.launch import torchrun
torchrun.LAST_SECONDS = 8.0
rank, starts, stuck = sys.argv[1:]
def stop_when_started():
    while not os.path.exists(starts) or len(open(starts).read().split()) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)  # a second one, as of scancel: the ranks still save
threading.Thread(target=stop_when_started, daemon=True).start()
options = ["--standalone", "--nproc-per-node", "2", "--signals-to-handle", "SIGTERM,SIGUSR1"]
print("STATUS", torchrun.main([*options, rank, starts, stuck]), flush=True)
"""


@pytest.mark.parametrize(("stuck", "status"), [("none", REQUEUE), ("1", 128 + 9)])
def test_ranks_may_save_for_longer_than_torchrun_waits_but_not_one_alone(stuck, status, tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(SLOW_RANK)
    command = [sys.executable, "-c", LAUNCH_SLOW, str(rank), str(tmp_path / "starts"), stuck]
    # torchrun's: 30
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=env)
    assert f"STATUS {status}\n" in done.stdout, done.stderr
    assert sorted((tmp_path / "starts").read_text().split()) == ["01", "11"]
    assert time.monotonic() - started < 400


def test_its_own_lines_are_json_where_that_is_asked_for(tmp_path):
    options = [
        "--log-format",
        "json",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--no-python",
        "sh",
        "-c",
        "exit 7",
    ]
    command = [sys.executable, "-m", "megatron_rl.launch", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 7, done.stderr
    (row,) = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert (row["event"], row["error"], row["exit_status"]) == ("error", "RanksEnded", 7)
    assert "rank 0 ended first; exit status 7" in row["text"]


def test_exit_statuses_are_kept_and_only_failures_start_again(tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    command = [sys.executable, "-c", LAUNCH, str(rank), f"{tmp_path}/", *ENDS]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=env)
    statuses = [
        int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("STATUS")
    ]
    assert statuses == [status for status, _ in ENDS.values()], done.stderr
    starts = [(tmp_path / end).read_text().split().count("1") for end in ENDS]
    assert starts == [times for _, times in ENDS.values()]
    assert f"rank 1 ended first; exit status {STALLED}" in done.stderr


def test_a_port_that_is_taken_is_named_with_its_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--nproc-per-node", "1", "--master-port", str(port), "--no-python", "true"]
        command = [sys.executable, "-m", "megatron_rl.launch", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"listens on 127.0.0.1:{port}; set another --master-port" in done.stderr
