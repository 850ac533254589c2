"""Start, wait for and stop one SGLang server; server_pool.py runs several.

A server started here is a child in its own session: it dies with this process (also under SIGKILL),
and stop() kills every process of its session.  Its output is written to a log file.  Servers that
others started are only inspected.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NotRequired, TypedDict, Unpack

import httpx
import psutil

from megatron_rl.config import RolloutConfig
from megatron_rl.config.device_limits import Device
from megatron_rl.config.rules.server_gpus import MEM_FRACTION_STATIC, derived_tensor_ranks
from megatron_rl.config.rules.server_rules import check_host, check_python
from megatron_rl.config.sglang_settings import BY_NAME, read_options
from megatron_rl.launch import nccl
from megatron_rl.rollout.server.ports import check_port_is_free, free_port
from megatron_rl.rollout.server.server_info import ServerError, auth_headers

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
PING_SECONDS = 5.0
PROGRESS_SECONDS = 30.0
LOG_TAIL_BYTES = 64 * 2**10  # a log of weeks may have gigabytes
STOP_GRACE_SECONDS = 3.0  # SGLang needs about 8 s to exit by itself and has nothing to save
# loaded at import, as after fork() only a call into it is safe
LIBC = ctypes.CDLL(None, use_errno=True)


class ServerOptions(TypedDict):
    """Parameters of a server's command line beside the model and [rollout]."""

    device: Device
    seed: int
    want_routes: NotRequired[bool]
    weight_version: NotRequired[str]


@dataclass(eq=False)
class Server:
    """An SGLang server that this process owns, running or starting."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    headers: dict[str, str] | None = None
    """Authorization header of requests to it."""
    start_timeout: float = 0.0
    """Seconds from the creation of this object in which it must answer."""
    private_dir: tempfile.TemporaryDirectory[str] | None = None
    """Folder with its API key while it starts, removed when it answers or is stopped."""

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.start_timeout

    def check_alive(self) -> None:
        """Raise ServerError with the end of the log when the server has exited."""
        code = self.process.poll()
        if code is not None:
            raise ServerError(
                f"SGLang server {self.url} exited with status {code}; {log_tail(self.log_path)}"
            )

    def ping(self, seconds: float) -> bool:
        """Return True if /model_info answers 200.

        Raises httpx.TransportError, and its subclass TimeoutException after `seconds`.
        """
        # not /health: it hangs while the server is paused; no proxy: the server is ours
        answer = httpx.get(
            f"{self.url}/model_info", headers=self.headers, timeout=seconds, trust_env=False
        )
        return answer.status_code == 200

    def is_ready(self) -> bool:
        """Return True if the server answers.

        Raises ServerError when it has exited or did not answer within its start time.
        """
        self.check_alive()
        with contextlib.suppress(httpx.TransportError):  # not listening yet
            if self.ping(PING_SECONDS):
                self.forget_key()
                return True
        if time.monotonic() > self.deadline:
            raise ServerError(
                f"SGLang server {self.url} was not ready after rollout.start_timeout_seconds ="
                f" {self.start_timeout:g}, in which it got {self.cpu_seconds():.0f} s of CPU time;"
                " stop other programs if that is little, raise the setting if the model is large;"
                f" {log_tail(self.log_path)}"
            )
        return False

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server's processes have used, which is little on a machine
        that other programs keep busy.
        """
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(process.cpu_times()[:2])  # user and system
        return total

    def wait_until_ready(self, log: Callable[[str], None] | None = None) -> None:
        """Wait until the server answers; `log` gets a line every PROGRESS_SECONDS.

        Raises ServerError as is_ready does.
        """
        reported = time.monotonic()
        while not self.is_ready():
            if log is not None and time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                waited = self.start_timeout - (self.deadline - reported)
                log(
                    f"SGLang server {self.url} is not ready yet: {waited:.0f} s of at most"
                    f" {self.start_timeout:g}, {self.cpu_seconds():.0f} s of CPU time, log in"
                    f" {self.log_path}"
                )
            time.sleep(0.2)

    def forget_key(self) -> None:
        if self.private_dir is not None:
            self.private_dir.cleanup()
            self.private_dir = None

    def stop(self) -> None:
        """Send SIGTERM, wait a short time, then send SIGKILL to the remaining processes of the
        server's session.  A second call does nothing.
        """
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also its schedulers, which outlive it
        self.process.wait()
        self.forget_key()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def launch_server(
    model: Path, rollout: RolloutConfig, *, log_path: Path, **options: Unpack[ServerOptions]
) -> Server:
    """Start an SGLang server, a context manager, and wait until it answers.

    Raises what start_server raises, and ServerError when the server does not answer in time.
    """
    server = start_server(model, rollout, log_path=log_path, **options)
    try:
        server.wait_until_ready()
    except BaseException:  # an interrupt, too, must not leave a server running
        server.stop()
        raise
    return server


def start_server(
    model: Path,
    rollout: RolloutConfig,
    *,
    log_path: Path,
    port: int | None = None,
    gpus: Sequence[int | str] = (),
    **options: Unpack[ServerOptions],
) -> Server:
    """Start an SGLang server on checkpoint `model` and return immediately.

    log_path: file to which its output is appended.
    port: rollout.port by default, or a free one.
    seed: SGLang's --random-seed.  What it samples also depends on how requests are batched, so a
    run is repeatable in distribution, not bit by bit.

    The kernel ties the child to the calling THREAD: it is killed when that thread ends.

    Raises ServerError (port in use) and ValueError (unsafe host, missing API key, no such
    rollout.python).
    """
    headers = auth_headers(rollout)
    check_host(rollout.host, has_key=bool(headers))
    check_python(rollout)
    port = port or rollout.port or free_port(rollout.host)
    check_port_is_free(rollout.host, port)  # SGLang would notice only after it has loaded the model
    command = server_command(model, rollout, port=port, **options)
    private = tempfile.TemporaryDirectory(prefix="megatron_rl_server_") if headers else None
    if private is not None:
        command += ["--config", str(write_key_file(Path(private.name), headers))]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab") as log:
        process = spawn(command, options["device"], log, gpus=gpus)
    host = f"[{rollout.host}]" if ":" in rollout.host else rollout.host
    return Server(
        f"http://{host}:{port}",
        process,
        log_path,
        headers=headers,
        start_timeout=rollout.start_seconds(options["device"]),
        private_dir=private,
    )


def server_command(
    model: Path,
    rollout: RolloutConfig,
    *,
    port: int,
    device: Device,
    seed: int,
    want_routes: bool = True,
    weight_version: str = "0",
) -> list[str]:
    """Return the command line of the server, without the API key; `rollout.server_args` come last
    and override the others.
    """
    module = "megatron_rl.rollout.server.sglang_cpu" if device == "cpu" else "sglang.launch_server"
    python = str(rollout.python or sys.executable)
    command = [python, "-m", module, "--model-path", str(model)]
    command += ["--host", rollout.host, "--port", str(port)]
    command += ["--dtype", server_dtype(model, rollout.dtype), "--random-seed", str(seed)]
    # requests and answers are token ids
    command += ["--weight-version", weight_version, "--skip-tokenizer-init", "--skip-server-warmup"]
    command += ["--max-total-tokens", str(rollout.max_total_tokens)]
    command += ["--max-running-requests", str(rollout.max_running_requests)]
    command += ["--sleep-on-idle"]  # otherwise the idle scheduler keeps a core busy
    if want_routes:
        command += ["--enable-return-routed-experts"]
    command += options_on_gpus(rollout, device, want_routes=want_routes)
    if rollout.release_memory:
        command += ["--enable-memory-saver"]
    if rollout.weight_update == "in_place":
        command += ["--disable-overlap-schedule"]  # reason: server_info.check_in_place
    if device == "cpu":
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
    elif size := derived_tensor_ranks(rollout):
        command += ["--tp-size", str(size)]
    return command + list(rollout.server_args)


def options_on_gpus(rollout: RolloutConfig, device: Device, *, want_routes: bool) -> list[str]:
    """Return the options that the run sets on GPUs where SGLang's own choice may be wrong for it.

    Its choice of --mem-fraction-static may leave a weight sync too little memory, and its choice of
    --moe-runner-backend may capture no expert ids (config/sglang_settings.toml).  Exchanges of
    experts (--moe-a2a-backend) need runners of their own, so the latter is not set with one.
    """
    if device == "cpu":
        return []
    options = ["--mem-fraction-static", str(MEM_FRACTION_STATIC)]
    exchange = read_options(rollout.server_args).get("moe_a2a_backend")
    if want_routes and exchange in BY_NAME["moe_a2a_backend"].usual:
        options += ["--moe-runner-backend", "triton"]
    return options


def server_dtype(model: Path, dtype: str) -> str:
    """Return `dtype`, or for "auto" the checkpoint's, as SGLang's own auto would serve a float32
    checkpoint in float16.
    """
    if dtype != "auto":
        return dtype
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path = {model}: cannot read config.json: {error}; rollout.dtype = auto needs"
            " the checkpoint's dtype: correct the path, or set rollout.dtype"
        ) from error
    # transformers 5 writes dtype, 4 torch_dtype
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def spawn(
    command: list[str], device: Device, log: IO[bytes], *, gpus: Sequence[int | str] = ()
) -> subprocess.Popen[bytes]:
    """Start `command` in a new session that is killed when the calling thread ends.

    gpus: the GPUs that it sees; () for all that this process sees.
    """
    # torchrun's variables would make SGLang's own process groups look for torchrun's store
    torchrun = ("TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_")
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE") and not name.startswith(torchrun)
    }
    env["PYTHONUNBUFFERED"] = "1"  # its log is read while it runs
    # log-probs of the distribution that was sampled, temperature included
    env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if "--enable-memory-saver" in command:  # otherwise SGLang's graphs are not among what it frees
        env.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
    if device == "cuda":
        nccl.set_defaults(env, command)
    else:
        # servers share the cores with the ranks: one thread each, unless the user sets more
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    parent = os.getpid()

    def die_with_parent() -> None:
        # SGLang's own children are tied to the server in the same way
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,  # SGLang must not read the terminal of the run
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # stop() kills the processes of this session
        preexec_fn=die_with_parent,
    )


def write_key_file(folder: Path, headers: dict[str, str]) -> Path:
    """Write the API key to a file that only this user can read, and return its path: SGLang takes
    the key as --api-key, and every user can read a command line.

    SGLang logs all its arguments, key included, at level info; level warning keeps the key out of
    the log.
    """
    path = folder / "server.yaml"
    key = headers["Authorization"].removeprefix("Bearer ")
    # O_EXCL and the mode in one call: it is never readable by others
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        # a JSON string is a YAML string
        file.write(f"api-key: {json.dumps(key)}\nlog-level: warning\n")
    return path


def log_tail(path: Path) -> str:
    """Return the last lines of a log, or why there are none: it may have been deleted meanwhile."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"no log ({error})"
    return f"last lines of {path}:\n" + "\n".join(lines[-15:])
