"""Starting a server: the command line, what is refused before it starts, and that no process
outlives its owner.
"""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.config.rules.server_rules import check_host
from megatron_rl.rollout.server import process as process_module
from megatron_rl.rollout.server.process import (
    Server,
    ServerError,
    launch_server,
    server_command,
    server_dtype,
    spawn,
    write_key_file,
)
from tests.fake_server import wait_for

# a fake server: ignores SIGTERM, has a child process and listens on no port
STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); time.sleep(60)"
)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def launch(tmp_path: Path, **rollout) -> Server:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return launch_server(
        model, RolloutConfig(**rollout), device="cpu", log_path=tmp_path / "log", seed=0
    )


def test_the_command_line_has_every_option(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    rollout = RolloutConfig(
        max_total_tokens=512, max_running_requests=8, server_args=("--page-size", "16")
    )
    settings = {
        "device": "cpu",
        "port": 1234,
        "seed": 5,
        "want_routes": True,
        "weight_version": "3",
    }
    command = " ".join(server_command(tmp_path, rollout, **settings))
    for part in (
        "-m megatron_rl.rollout.server.sglang_cpu",
        f"--model-path {tmp_path}",
        "--host 127.0.0.1 --port 1234",
        "--dtype bfloat16",
        "--random-seed 5",
        "--weight-version 3",
        "--max-total-tokens 512",
        "--max-running-requests 8",
        "--enable-return-routed-experts",
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--device cpu --attention-backend torch_native",
    ):
        assert part in command, part
    assert command.endswith("--page-size 16")
    on_gpu = " ".join(
        server_command(tmp_path, rollout, **(settings | {"device": "cuda", "want_routes": False}))
    )
    assert "-m sglang.launch_server" in on_gpu
    assert "torch_native" not in on_gpu and "routed-experts" not in on_gpu
    # room for a weight sync; options of the user come later, so that SGLang's parser takes theirs
    assert "--mem-fraction-static" not in command
    assert on_gpu.endswith("--mem-fraction-static 0.8 --page-size 16")


def test_experts_are_run_by_a_backend_that_captures_their_ids(tmp_path):
    """On Blackwell SGLang would take flashinfer_trtllm by itself."""
    (tmp_path / "config.json").write_text("{}")

    def triton(*args, **changed):
        options = {"device": "cuda", "port": 1, "seed": 0, **changed}
        return "--moe-runner-backend triton" in " ".join(
            server_command(tmp_path, RolloutConfig(server_args=args), **options)
        )

    assert triton() and triton("--moe-a2a-backend", "none")
    assert not triton(want_routes=False) and not triton(device="cpu")
    # deepep_v2 needs deep_gemm, and chooses it
    assert not triton("--moe-a2a-backend", "deepep_v2") and not triton("--moe-a2a=deepep")


def test_servers_start_with_their_own_python_and_all_their_gpus(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rollout = RolloutConfig(python="/opt/sglang/bin/python", gpus=(4, 5, 6, 7), num_servers=2)

    def command(device, **changed):
        return server_command(
            tmp_path, rollout.model_copy(update=changed), device=device, port=1, seed=0
        )

    assert command("cuda")[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert command("cuda")[-2:] == ["--tp-size", "2"]
    assert command("cuda", python=None)[0] == sys.executable
    assert command("cuda", server_args=("--tp-size=2",))[-2:] == [
        command("cuda")[-3],
        "--tp-size=2",
    ]
    assert not {"--tp-size"} & ({*command("cpu")} | {*command("cuda", gpus=())})


def test_graphs_are_in_the_memory_that_servers_release(tmp_path, monkeypatch):
    """Without the variable SGLang would capture them outside of what the tag cuda_graph frees."""
    name = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    monkeypatch.delenv(name, raising=False)

    def environment(*args):
        with open(tmp_path / "log", "wb") as log:
            spawn(["sh", "-c", "env", *args], "cuda", log).wait()
        return (tmp_path / "log").read_text()

    assert f"{name}=true\n" in environment("--enable-memory-saver")
    assert name not in environment()
    monkeypatch.setenv(name, "false")
    assert f"{name}=false\n" in environment("--enable-memory-saver"), "the user's"


def test_a_python_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"rollout\.python = /no/such/python: no such program.*/opt/sglang/bin/python",
    ):
        launch(tmp_path, python="/no/such/python")


def test_the_python_of_the_servers_is_the_one_that_runs(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "started $*" > {tmp_path}/seen\n')
    python.chmod(0o755)
    with pytest.raises(ServerError, match="exited with status 0"):
        launch(tmp_path, python=str(python))
    assert (
        (tmp_path / "seen")
        .read_text()
        .startswith("started -m megatron_rl.rollout.server.sglang_cpu")
    )


def test_auto_dtype_is_that_of_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert server_dtype(tmp_path, "auto") == "float32"
    assert server_dtype(tmp_path, "bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match=r"model\.path = .*absent"):
        server_dtype(tmp_path / "absent", "auto")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_a_host_that_is_not_loopback_needs_a_key(host, tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.host.*rollout\.api_key_env"):
        launch(tmp_path, host=host)
    check_host(host, has_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_a_loopback_host_needs_no_key(host):
    check_host(host, has_key=False)


def test_a_missing_key_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(ValueError, match="SERVER_KEY"):
        launch(tmp_path, api_key_env="SERVER_KEY")


def test_the_key_file_is_private_and_exact(tmp_path):
    path = write_key_file(tmp_path, {"Authorization": 'Bearer a"b: #\\c'})
    assert path.stat().st_mode & 0o777 == 0o600
    import yaml

    assert yaml.safe_load(path.read_text()) == {"api-key": 'a"b: #\\c', "log-level": "warning"}


def test_a_port_in_use_is_named_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"rollout\.port = {port}.*in use"):
            launch(tmp_path, port=port)
    assert not (tmp_path / "log").exists()


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ServerError, match="exited with status") as caught:
        launch(tmp_path, server_args=("--no-such-option",))
    assert "unrecognized arguments: --no-such-option" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("start\n" + "x" * process_module.LOG_TAIL_BYTES + "\nlast words\n")
    tail = process_module.log_tail(log)
    assert tail.endswith("x\nlast words") and "start" not in tail
    log.unlink()
    assert process_module.log_tail(log).startswith("no log ([Errno 2]")


def test_a_server_on_a_busy_machine_shows_its_cpu_time(tmp_path, monkeypatch):
    """Who waits sees how much CPU time the server got; so does the message when its time is
    over.
    """
    monkeypatch.setattr(process_module, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(process_module.Server, "ping", lambda self, seconds: False)
    (tmp_path / "log").write_text("loading\n")
    code = (
        "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end:"
        " pass\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as running:
        lines: list[str] = []
        server = process_module.Server(
            "http://127.0.0.1:1", running, tmp_path / "log", start_timeout=600.0
        )
        try:
            assert wait_for(lambda: server.cpu_seconds() > 1, 60)
            server.start_timeout, server.deadline = 1.5, time.monotonic() + 1.5
            with pytest.raises(
                ServerError,
                match=r"= 1.5, in which it got [1-9]\d* s of CPU time; stop other programs",
            ):
                server.wait_until_ready(lines.append)
        finally:
            running.kill()
    assert lines and "s of at most 1.5, " in lines[0] and re.search("[1-9] s of CPU time", lines[0])


def test_a_server_that_is_not_ready_in_time_is_stopped(tmp_path):
    with pytest.raises(ServerError, match=r"rollout\.start_timeout_seconds = 0\.5"):
        launch(tmp_path, start_timeout_seconds=0.5)

    def processes():
        return subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, text=True, check=True
        ).stdout

    assert wait_for(lambda: str(tmp_path) not in processes(), 60)


def test_stop_kills_all_processes_and_may_be_repeated(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        process = spawn([sys.executable, "-c", STUBBORN], "cpu", log)
    assert wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"), 30)
    child = int((tmp_path / "log").read_text())
    with Server("http://127.0.0.1:1", process, tmp_path / "log") as server:
        server.check_alive()
        assert is_running(child)
    assert not is_running(process.pid) and wait_for(lambda: not is_running(child), 60)
    server.stop()
    with pytest.raises(ServerError, match="exited with status -9"):
        server.check_alive()


def test_the_server_dies_with_its_owner_even_when_that_is_killed(tmp_path):
    owner_code = (
        "import sys, time; from megatron_rl.rollout.server.process import spawn; process ="
        " spawn(['sleep', '60'], 'cpu', open(sys.argv[1], 'wb')); print(process.pid, flush=True);"
        " time.sleep(60)"
    )
    command = [sys.executable, "-c", owner_code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            server = int(owner.stdout.readline())
            assert is_running(server)
        finally:
            owner.kill()
    assert wait_for(lambda: not is_running(server), 60)


def test_torchruns_variables_do_not_reach_the_server(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    with open(tmp_path / "log", "wb") as log:
        spawn(["env"], "cpu", log).wait()
    names = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert {"KEPT", "PATH", "OMP_NUM_THREADS"} <= names
    assert not names & {
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "LOCAL_RANK",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
