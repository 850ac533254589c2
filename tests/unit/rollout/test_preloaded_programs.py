"""agent.preload: programs that are forked from a process which has imported their modules."""

import asyncio
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from pydantic import ValidationError

from megatron_rl.config import AgentConfig
from megatron_rl.rollout.agents.episode import EpisodeError
from megatron_rl.rollout.agents.rollout_function import user_processes
from megatron_rl.workers import forks
from megatron_rl.workers.program import TAIL_BYTES


def run(processes, *, question="question", env=()):
    return asyncio.run(processes.run({**os.environ, **dict(env)}, question))


def programs(*command, preload=("json",), **settings):
    agent = AgentConfig(command=command, renderer="qwen3", preload=preload, **settings)
    return user_processes(agent, ["SERVERS"])


@pytest.fixture
def coded(tmp_path):
    """Return processes that run a code."""

    def make(code, python=sys.executable, **settings):
        path = tmp_path / f"code{len(list(tmp_path.glob('code*.py')))}.py"
        path.write_text(code)
        return programs(python, str(path), **settings)

    return make


def test_a_program_is_run_as_python_runs_it(tmp_path):
    """Its file, module or code: the same arguments, path, input, outputs and status."""
    (tmp_path / "beside.py").write_text("value = 4")
    code = (
        "import json, os, sys, subprocess; from pathlib import Path\n"
        "print(__name__, sys.argv[1:], sys.stdin.read(), os.environ['WORD'], flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'print(5)'])\n"
        "sys.stdout.buffer.write(b'bytes\\n'); print('wrong', file=sys.stderr); sys.exit(7)"
    )
    (tmp_path / "program.py").write_text("import beside\n" + code)
    env = {**os.environ, "WORD": "word", "PYTHONPATH": str(tmp_path)}
    for arguments in ([str(tmp_path / "program.py")], ["-m", "program"]):
        processes = programs(sys.executable, *arguments, "x", "y")
        python = subprocess.run(
            [sys.executable, *arguments, "x", "y"],
            env=env, input="question", capture_output=True, text=True, check=False,
        )  # fmt: skip
        os.environ["PYTHONPATH"] = str(tmp_path)  # of the process that forks
        try:
            forked = run(processes, env={"WORD": "word"})
        finally:
            del os.environ["PYTHONPATH"]
            processes.close()
        assert forked == (7, python.stdout, python.stderr), arguments
        assert python.returncode == 7 and "__main__ ['x', 'y'] question word\n5" in python.stdout


def test_modules_are_imported_once_and_no_program_sees_what_another_did(
    tmp_path, monkeypatch, coded
):
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('imported ')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "secret")
    code = (
        "import os, random, slow; print(hasattr(slow, 'seen'), random.random()); slow.seen = 1\n"
        "print(os.getppid(), os.environ.get('MY_TOKEN'))"
    )
    processes = coded(code, preload=("slow",))
    try:
        processes.start()
        env = {name: value for name, value in os.environ.items() if name != "MY_TOKEN"}
        ended = [asyncio.run(processes.run(env, "")) for _ in range(3)]
        parent = processes._process
        assert "MY_TOKEN" not in psutil.Process(parent.pid).environ()
    finally:
        processes.close()
    assert [status for status, *_ in ended] == [0] * 3
    lines = [output.splitlines() for _, output, _ in ended]
    assert len({first for first, _ in lines}) == 3  # each draws other numbers
    assert all(first.startswith("False") and last == f"{parent.pid} None" for first, last in lines)
    assert (tmp_path / "log").read_text() == "imported "


def test_a_long_input_and_the_end_of_a_long_output(coded):
    processes = coded("text = input(); print(text * 2); print('end')")
    try:
        status, output, _ = run(processes, question="x" * 300_000 + "\n")
        assert status == 0 and len(output) == TAIL_BYTES and output.endswith("x\nend\n")
    finally:
        processes.close()


def test_a_program_is_killed_with_its_children_when_its_episode_ends(coded):
    code = "import subprocess, time; print(1); subprocess.Popen(['sleep', '987']); time.sleep(987)"
    processes = coded(code)

    async def cut_short():
        async with asyncio.timeout(3.0):
            await processes.run(os.environ, "")

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(cut_short())
        parent = psutil.Process(processes._process.pid)
        limit = time.monotonic() + 10
        while parent.children(recursive=True) and time.monotonic() < limit:
            time.sleep(0.05)
        sleeping = [
            p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]
        ]
        assert not parent.children(recursive=True) and not sleeping
    finally:
        processes.close()


def test_a_lost_program_and_one_without_memory(coded):
    lost = "its process ended (os._exit, os.exec, a signal or memory), and what it wrote is lost"
    for code, why in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", lost),
        ("import os; os._exit(0)", lost),
        ("import os; os.execv('/bin/true', ['true'])", lost),
        ("x = bytearray(2**34)", "MemoryError"),
    ):
        processes = coded(code, process_memory_gib=8.0)
        try:
            status, _, errors = run(processes)
        finally:
            processes.close()
        assert status == 1 and why in errors


@pytest.mark.parametrize(
    "python, preload, why",
    [
        (sys.executable, "no_such_module", "No module named 'no_such_module'"),
        ("/bin/false", "json", "the process exited with 1"),
    ],
)
def test_what_cannot_be_imported_is_named_at_the_start(python, preload, why, coded):
    processes = coded("", python, preload=(preload,))
    with pytest.raises(EpisodeError, match=f"agent.preload = .{preload!r}.: {python} .*{why}"):
        processes.start()


def test_imports_that_take_too_long_are_named_at_the_start(tmp_path, coded, monkeypatch):
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forks, "START_SECONDS", 0.5)
    processes = coded("", preload=("slow_import",))
    with pytest.raises(EpisodeError, match="agent.preload = .'slow_import'.: .*within 0.5 s"):
        processes.start()
    assert processes._process is None
    assert run(processes)[0] == 1, "an episode's program has failed, and its run has not"


@pytest.mark.parametrize(
    "end", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()", "sys.stdout = Lines()"]
)
def test_a_program_may_close_or_replace_its_outputs(coded, end):
    code = (
        f"import sys\nclass Lines:\n    def flush(self): pass\nprint('0.75', flush=True)\n{end}\n"
    )
    processes = coded(code)
    try:
        assert run(processes) == (0, "0.75\n", "")
    finally:
        processes.close()


def test_another_python_needs_nothing_of_the_trainer(tmp_path, coded):
    """Such as that of a framework's own environment, here one without any package."""
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    code = (
        "import importlib.util as u, json, sys\n"
        "names = ('numpy', 'torch', 'pydantic')\n"
        "print(json.dumps([sys.prefix, [n for n in names if u.find_spec(n)]]))"
    )
    processes = coded(code, str(python))
    try:
        status, output, errors = run(processes)
    finally:
        processes.close()
    assert status == 0, errors
    assert json.loads(output) == [str(tmp_path / "bare"), []]


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"preload": ("json",)}, "no effect without command"),
        ({"preload": ("json",), "command": ("run.sh",), "renderer": "qwen3"}, "needs a command"),
        ({"preload": ("json",), "command": ("bash", "x.sh"), "renderer": "qwen3"}, "FILE.py"),
        ({"preload": ("json",), "command": ("python", "-u", "x.py"), "renderer": "q"}, "-m"),
    ],
)
def test_only_a_python_program_can_be_forked(settings, why):
    with pytest.raises((ValidationError, ValueError), match=f"preload = .*{why}"):
        problems = list(AgentConfig(**settings).problems())
        raise ValueError(problems[0])


def test_threads_that_a_program_leaves_are_waited_for(coded):
    """An idle executor ends; another thread may still write."""
    code = (
        "import threading, time; from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1); print(pool.submit(len, 'ab').result())\n"
        "def late():\n    time.sleep(0.3); print('late')\n"
        "threading.Thread(target=late).start()\n"
        "threading.Thread(target=time.sleep, args=(987,), daemon=True).start()"
    )
    processes = coded(code)
    try:
        assert run(processes) == (0, "2\nlate\n", "")
    finally:
        processes.close()
