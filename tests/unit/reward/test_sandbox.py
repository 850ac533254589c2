"""A gallery of hostile programs proves each wall of the sandbox, for every mechanism of this
machine.

To test bubblewrap where it is not installed, put a `bwrap` of the distribution's package on PATH.
"""

import errno
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward.pool import RewardError, RewardPool
from megatron_rl.reward.sandbox import box as module
from megatron_rl.reward.sandbox.box import Box, Limits, SandboxError, end, find_box, problem_of
from megatron_rl.reward.sandbox.programs import kernel, system_calls
from megatron_rl.rollout.server.ports import free_port
from tests.fake_server import wait_for
from tests.unit.reward import hostile_programs as hostile

SECRET = "the trainer's secret"
SHORT = Limits(seconds=1.5, processes=6, box_mib=4, memory_mib=256)
LONG = Limits(seconds=20.0, processes=6, box_mib=4, memory_mib=256)


def skip_without(mechanism):
    """Skip where the machine has no such mechanism; fail where a wall of it does not hold."""
    reason = problem_of(mechanism)
    if reason is not None:
        assert re.search("is not installed|not permitted|Permission denied", reason), reason
        pytest.skip(f"{mechanism} does not work on this machine: {reason}")


@pytest.fixture(params=["bubblewrap", "unshare"])
def mechanism(request):
    skip_without(request.param)
    return request.param


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Values for the programs: what they must not reach."""
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    os.chmod(path, 0o644)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return {"secret_file": str(path), "folder": str(tmp_path), "marker": secrets.token_hex(16)}


def run(mechanism, program, limits, **values):
    # as text.format does not, a program has braces of its own only where they are doubled
    return Box(mechanism, limits).run(program.format(**values))


def processes_with(marker):
    """Processes of this machine that run a program with the marker in its source."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def assert_gone(marker):
    assert wait_for(lambda: not processes_with(marker), 5), processes_with(marker)


def test_a_program_has_standard_python_input_output_and_a_folder(mechanism):
    program = """
import json, math, re, sys, collections, datetime, decimal, itertools, hashlib, ctypes
open("own.txt", "w").write("own")
print(json.dumps([open("/box/own.txt").read(), sys.stdin.read(), math.sqrt(4)]))
sys.exit(3)
"""
    # process 1 is not the program's: it could change what ends it with its caller
    assert Box(mechanism, LONG).run("import os; print(os.getpid() > 1)").output == b"True\n"
    outcome = Box(mechanism, LONG).run(program, b"input")
    assert json.loads(outcome.output) == ["own", "input", 2.0] and outcome.status == 3
    assert not outcome.is_late and not outcome.is_too_long
    # nothing of a program is there for the next one
    again = Box(mechanism, LONG).run("import os; print(os.listdir('/box'))")
    assert again.output == b"[]\n"


@pytest.mark.parametrize("program", [hostile.READS, hostile.LINKS], ids=["reads", "links"])
def test_files_and_environment_of_the_trainer_cannot_be_read(mechanism, outside, program):
    output = run(mechanism, program, LONG, **outside).output.decode()
    assert output.endswith("end\n")
    assert SECRET not in output and "root:" not in output and "WANDB" not in output
    assert "/work" not in output and "megatron_rl" not in output


def test_a_program_sees_only_python_and_shared_libraries(mechanism):
    program = """
import os
print(sorted(os.listdir("/")))
print([name for name in ("site-packages", "dist-packages")
       for folder in ("/usr/lib/python3", *__import__("glob").glob("/python/lib*/python3*"))
       if os.path.isdir(f"{folder}/{name}") and os.listdir(f"{folder}/{name}")])
try:
    import numpy
    print("numpy")
except ImportError:
    pass
"""
    lines = Box(mechanism, LONG).run(program).output.decode().splitlines()
    known = {"box", "dev", "etc", "lib", "lib64", "programs", "python", "tmp"} | {"usr"}
    assert set(re.findall(r"\w+", lines[0])) <= known and lines[1:] == ["[]"]


@pytest.mark.parametrize("program", [hostile.WRITES, hostile.NESTED], ids=["plain", "nested"])
def test_nothing_outside_the_box_can_be_written(mechanism, outside, program):
    output = run(mechanism, program, LONG, **outside).output.decode()
    assert "end" in output and "ESCAPED" not in output and SECRET not in output
    assert sorted(path.name for path in Path(outside["folder"]).iterdir()) == ["secret.txt"]
    assert not list(module.PROGRAMS.glob("escaped*"))
    if "forks" in output:  # a namespace of its own gives no further processes
        assert int(re.search(r"forks (\d+)", output)[1]) < LONG.processes


def test_the_network_and_the_loopback_of_the_machine_cannot_be_reached(mechanism, outside):
    name = f"megatron-rl-{secrets.token_hex(8)}"
    with (
        socket.create_server(("0.0.0.0", free_port("0.0.0.0"))) as server,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        port = server.getsockname()[1]
        datagrams.bind(("0.0.0.0", port))  # outside the range of other programs' datagrams
        local.bind(f"\0{name}")
        local.listen()
        values = {"port": port, "socket_name": name, "own_address": own_address()}
        output = run(mechanism, hostile.NETWORK, LONG, **values).output.decode()
        assert output == "end\n"
        for listener in (server, local, datagrams):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(1) if listener is datagrams else listener.accept()


def own_address():
    """The address of this machine in its network, or that of a test network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "192.0.2.2"


def test_system_calls_that_undo_walls_fail(mechanism):
    program = hostile.SYSTEM_CALLS
    assert Box(mechanism, LONG).run(program).output == b"[]\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls_is_that_of_its_table(machine):
    """Run by an interpreter of the kernel's BPF, for every number and the arguments that matter."""
    names = (*system_calls.NAMES, *system_calls.OTHERS)
    numbers = dict(zip(names, system_calls.NUMBERS[machine], strict=True))
    program = system_calls.filter_for(machine)

    def answer(number, argument=0, arch=system_calls.AUDIT_ARCH[machine]):
        values, place, loaded = {0: number, 4: arch, 16: argument}, 0, 0
        while True:
            code, if_true, if_false, operand = program[place]
            place += 1
            if code == system_calls.RETURN:
                return operand
            if code == system_calls.LOAD:
                loaded = values[operand]
                continue
            is_true = {
                system_calls.EQUAL: loaded == operand, system_calls.ANY_BIT: loaded & operand,
                system_calls.AT_LEAST: loaded >= operand,
            }[code]  # fmt: skip
            place += if_true if is_true else if_false

    denied, allowed = system_calls.FAIL | errno.EPERM, system_calls.ALLOW
    expected = dict.fromkeys(range(600), allowed)
    expected |= {numbers[name]: denied for name in system_calls.NAMES}
    expected[numbers["clone3"]] = system_calls.FAIL | errno.ENOSYS
    assert {number: answer(number) for number in expected} == expected
    assert answer(numbers["clone"], 0x01200011) == answer(numbers["clone"], 0x3D0F00) == allowed
    for flag in (17, 25, 26, 27, 28, 29, 30):
        assert answer(numbers["clone"], 17 | 1 << flag) == denied
    assert answer(numbers["prctl"], 1) == denied and answer(numbers["prctl"], 4) == allowed
    assert answer(39 | 1 << 30) == answer(39, arch=0x40000003) == denied, "another ABI"


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(machine, header):
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    names = (*system_calls.NAMES, *system_calls.OTHERS)
    assert [int(numbers[name]) for name in names] == [*system_calls.NUMBERS[machine]]


@pytest.mark.parametrize("name", ["FORK_BOMB", "LOOP", "SLEEP", "DEAF", "CLOSED", "OUTLIVES"])
def test_a_program_without_an_end_is_killed_with_all_its_processes(mechanism, outside, name):
    started = time.monotonic()
    outcome = run(mechanism, getattr(hostile, name), SHORT, **outside)
    assert outcome.is_late and time.monotonic() - started < SHORT.seconds + 5
    assert_gone(outside["marker"])


@pytest.mark.parametrize("name", ["FORKS", "THREADS"])
def test_processes_and_threads_are_limited(mechanism, outside, name):
    outcome = run(mechanism, getattr(hostile, name), LONG, **outside)
    # bubblewrap has one process of its own
    assert LONG.processes - 2 <= int(outcome.output) < LONG.processes and not outcome.is_late
    assert_gone(outside["marker"])


def test_programs_side_by_side_do_not_share_their_limit_of_processes(mechanism):
    box, source = Box(mechanism, LONG), hostile.FORKS.format(marker="x")
    running = [
        box.start(["-c", source], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        counts = [int(process.stdout.readline()) for process in running]
        assert min(counts) >= LONG.processes - 2
    finally:
        for process in running:
            end(process)


def test_memory_files_and_output_are_limited(mechanism, outside):
    outcome = run(mechanism, hostile.MEMORY_BOMB, LONG, **outside)
    assert 100 < int(outcome.output) < LONG.memory_mib and outcome.status == 0
    mebibytes, error = map(int, run(mechanism, hostile.FULL_BOX, LONG, **outside).output.split())
    assert mebibytes <= LONG.box_mib and error in (27, 28)  # EFBIG, ENOSPC
    outcome = run(mechanism, hostile.TALKATIVE, LONG, **outside)
    assert outcome.is_too_long and len(outcome.output) == LONG.output_bytes
    assert outcome.seconds < LONG.seconds / 2
    assert_gone(outside["marker"])
    # a program that is too long for a command
    for text in ("#" * 200_000, "é" * 20_000):
        assert Box(mechanism, LONG).run(f"# {text}").is_too_long


@pytest.mark.parametrize("name", ["DAEMON", "LOUD_DAEMON"])
def test_a_daemon_ends_with_the_program_that_left_it(mechanism, outside, name):
    outcome = run(mechanism, getattr(hostile, name), LONG, **outside)
    assert outcome.output == b"left\n" and outcome.seconds < LONG.seconds / 2
    assert_gone(outside["marker"])


@pytest.mark.parametrize("name", ["KILLS", "KILLS_ALL"])
def test_signals_reach_nobody_outside(mechanism, outside, name):
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        outcome = run(mechanism, getattr(hostile, name), LONG, **outside, caller=os.getpid())
        assert not outcome.is_late and bystander.poll() is None
        assert outcome.output == b"end\n" or name == "KILLS_ALL"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_program_dies_with_whoever_started_it(mechanism, outside):
    """As a reward worker does: it is killed after reward.timeout_seconds."""
    source = hostile.OUTLIVES.format(**outside)
    code = (
        "import sys; from megatron_rl.reward.sandbox.box import Box, Limits;"
        f"Box({mechanism!r}, Limits(seconds=60)).run(sys.argv[1])"
    )
    caller = subprocess.Popen([os.sys.executable, "-c", code, source], env=os.environ)
    try:
        # the caller itself has the source among its arguments
        assert wait_for(lambda: len(processes_with(outside["marker"])) >= 3, 20)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    assert_gone(outside["marker"])


def test_the_front_process_that_is_killed_takes_the_program_with_it(mechanism, outside):
    process = Box(mechanism, LONG).start(
        ["-c", hostile.SLEEP.format(**outside)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"asleep\n"
    end(process)
    assert_gone(outside["marker"])


def test_without_a_mechanism_programs_are_refused_by_name(monkeypatch):
    reasons = {"bubblewrap": "bwrap is not installed", "unshare": "unshare: not permitted"}
    monkeypatch.setattr(module, "problem_of", reasons.get)
    with pytest.raises(SandboxError) as caught:
        find_box()
    assert all(f"{name}: {reason}" in str(caught.value) for name, reason in reasons.items())
    assert "install bubblewrap" in str(caught.value)
    monkeypatch.setattr(module, "problem_of", {"bubblewrap": "x"}.get)
    assert find_box().mechanism == "unshare"
    with pytest.raises(SandboxError, match="bubblewrap: x"):
        find_box(mechanism="bubblewrap")


def test_a_wall_that_does_not_hold_is_found(monkeypatch):
    """The probe, in no box at all."""
    monkeypatch.setattr(
        Box,
        "command",
        lambda self, program, keep=(), **_: [os.sys.executable, *program],
    )
    reason = problem_of.__wrapped__("unshare")
    expected = [
        "/etc/passwd can be seen", "the loopback of the machine is there", "processes run",
        "may live longer than its caller", "shared memory that no limit",
    ]  # fmt: skip
    assert all(text in reason for text in expected), reason
    if os.getuid() == 0:
        assert "programs run as root" in reason


def test_a_run_without_a_sandbox_stops_before_it_trains(monkeypatch, tmp_path):
    """The worker of the reward function cannot load it: PATH has no bwrap, and unshare fails."""
    (tmp_path / "sitecustomize.py").write_text(
        "from megatron_rl.reward.sandbox import box\n"
        "box.problem_of = {'bubblewrap': 'no bwrap', 'unshare': 'not permitted'}.get\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = RewardConfig(function="megatron_rl.reward.code_tests:score")
    with pytest.raises(RewardError, match="cannot be loaded: .*no sandbox works on this machine"):
        with RewardPool(config):
            pass


def test_user_ids_are_those_of_nobody():
    assert {20_000 <= kernel.user_of(number) < 60_000 for number in range(0, 10**6, 997)} == {True}
