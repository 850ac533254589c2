"""What `make demo` has beside the trainer: installation, the kept model, the table of minutes.

The installation itself is run by whoever calls `make install`; here its Python and uv are scripts.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_rl_tools import tiny_digest
from megatron_rl_tools.make_tiny_moe import Settings
from tests.fake_server import wait_for

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tools"), str(ROOT / "examples/tiny_cpu")]
import times  # noqa: E402

import uv_options  # noqa: E402

LISTED = """\
:env:.find-links='/wheels /more'
:env:.default-timeout='180'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a\\nfile:///b'
global.index-url='https://weak.example/simple'
install.index-url='https://strong.example/simple'
install.no-index='false'
freeze.all='1'
"""


def test_uv_installs_as_pip_is_configured():
    assert list(uv_options.uv_options(uv_options.settings(LISTED))) == [
        "--find-links=/wheels",
        "--find-links=/more",
        "UV_HTTP_TIMEOUT=180",
        "--constraints=/etc/constraints.txt",
        "--index=file:///a",
        "--index=file:///b",
        "--default-index=https://strong.example/simple",
        "--index-strategy=unsafe-best-match",
    ]


@pytest.mark.parametrize("setting", ["no-binary=':all:'", "pre='1'", "proxy='http://p'"])
def test_a_setting_of_pip_that_uv_is_not_told_is_named(setting):
    with pytest.raises(uv_options.UnknownSettingError, match=setting.partition("=")[0]):
        list(uv_options.uv_options(uv_options.settings(f"global.{setting}\n")))


PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
*"install --disable-pip-version-check --quiet uv==0.13.9") {uv} ;;
*uv_options*) {options} ;;
*"import torch"*) exit 1 ;;
*) exit 0 ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$CALLS"
case "$*" in --version) echo "uv 9.9.9 (x)" ;; *requirements-cpu*) {packages} ;; esac
"""


def install(
    folder: Path, *, uv="exit 0", options="echo --index=file:///a", packages="exit 0", **env
):
    """Run install.sh in an environment of scripts; returns (process, calls)."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (
        ("python", PYTHON.replace("{uv}", uv).replace("{options}", options)),
        ("pip", "#!/bin/sh\n"),
        *([("uv", UV.replace("{packages}", packages))] if uv == "exit 0" else []),
    ):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    env |= {"PATH": os.environ["PATH"], "VENV": str(folder), "CALLS": str(calls)}
    process = subprocess.Popen(
        ["bash", "tools/install.sh"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
        # a shell cannot catch what was ignored when it was started, as in a job of nohup
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    return process, calls


def test_uv_installs_and_says_so(tmp_path):
    process, calls = install(tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "with uv 9.9.9; INSTALLER=pip takes pip" in said
    commands = [line for line in calls.read_text().splitlines() if line.startswith("uv pip")]
    assert all(" --index=file:///a" in command for command in commands)
    assert [command.rpartition("--index=file:///a ")[2] for command in commands[-3:]] == [
        "-r requirements-cpu.txt",
        f"--no-deps {next(iter(sglang()))}",
        "--no-deps -e . -e ./tools -e ./viewer",
    ]
    assert int((tmp_path / ".install_seconds").read_text()) < 60


def sglang():
    lines = (ROOT / "requirements-sglang.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("sglang==")]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"INSTALLER": "pip"}, "with pip (INSTALLER=pip)"),
        ({"uv": "exit 1"}, "with pip, which takes minutes longer: uv cannot be installed"),
        ({"options": "exit 1"}, "uv cannot follow this configuration of pip"),
    ],
)
def test_pip_alone_installs_too_and_the_reason_is_said(tmp_path, case, reason):
    process, calls = install(tmp_path, **case)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and reason in said, said
    done = calls.read_text()
    assert "pip install --disable-pip-version-check --quiet -r requirements-cpu.txt" in done
    assert "uv pip" not in done


@pytest.mark.parametrize("case", [{"INSTALLER": "conda"}, {"INSTALLER": "uv", "uv": "exit 1"}])
def test_what_was_asked_for_is_not_replaced(tmp_path, case):
    process, calls = install(tmp_path, **case)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"INSTALLER={case['INSTALLER']}" in said
    assert "requirements-cpu" not in calls.read_text()


CATCHES = """trap 'echo caught >>"$CALLS"; exit 1' INT; echo "ready $$" >>"$CALLS"
    for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done"""


@pytest.mark.parametrize("order", ["together", "command first"])
def test_an_interrupt_ends_the_installation(tmp_path, order):
    """pip catches Ctrl-C and fails, which is not a package that cannot be installed.

    order: the command may have ended before the script sees the signal.
    """
    process, calls = install(tmp_path, packages=CATCHES)
    assert wait_for(lambda: re.search(r"ready \d+\n", calls.read_text()), 60)
    if order == "command first":
        process.send_signal(signal.SIGSTOP)
        script = psutil.Process(process.pid)
        assert wait_for(lambda: script.status() == psutil.STATUS_STOPPED, 60)
    os.killpg(process.pid, signal.SIGINT)
    if order == "command first":
        uv = psutil.Process(int(re.search(r"ready (\d+)", calls.read_text())[1]))
        assert wait_for(lambda: uv.status() == psutil.STATUS_ZOMBIE, 60)
        process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and "caught" in calls.read_text()
    assert "sglang" not in calls.read_text() and not (tmp_path / ".install_seconds").exists()


@pytest.mark.parametrize("what", ["seed", "code", "packages", "processor"])
def test_a_kept_model_is_made_again_when_anything_it_depends_on_changes(monkeypatch, what):
    before = Settings().digest
    assert before == Settings().digest
    if what == "seed":
        assert Settings(seed=1).digest != before
        return
    changed = tiny_digest.surroundings() | {what: "another"}
    monkeypatch.setattr(tiny_digest, "surroundings", lambda: changed)
    assert Settings().digest != before


def test_the_digest_covers_the_code_that_makes_the_model():
    names = tiny_digest.surroundings()["code"]
    assert {"make_tiny_moe.py", "tiny_tasks.py", "tiny_digest.py"} <= names.keys()


def write_run(folder: Path) -> Path:
    """A run that was interrupted after step 2, and resumed at 1100 s."""
    folder.mkdir()
    (folder / ".model_seconds").write_text("0 1100\n")
    events = [
        (1010, 0, "start", None), (1020, 0, "evaluation", 9.0), (1050, 2, "stop", None),
        (1130, 2, "resume", None), (1250, 4, "evaluation", 20.0), (1260, 4, "stop", None),
    ]  # fmt: skip
    lines = [
        {"time": at, "step": step, "kind": kind, "text": ""} | ({"seconds": s} if s else {})
        for at, step, kind, s in events
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [
        {"step": step, "time/step": 40.0, "time/rollout": 30.0, "time/update": 10.0}
        for step in (1, 2, 3, 4)
    ]
    steps.append({"step": 4, "eval/heldout/avg@4": 0.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_the_table_says_where_the_minutes_of_this_start_went(tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / ".install_seconds").write_text("95\n")
    parts = times.parts_of(run, tmp_path, now=1265.0)
    assert [(name, seconds) for name, seconds, _ in parts] == [
        ("installation", 95), ("tiny model", 0), ("start", 30), ("training", 80),
        ("evaluation", 20), ("end", 35),
    ]  # fmt: skip
    assert "2 steps: rollout 1:00, update 0:20" in times.table(parts)
    assert times.table(parts).splitlines()[-1].split() == ["total", "4:20"]
    names = [name for name, _, _ in times.parts_of(run, tmp_path, now=1265.0)]
    assert "installation" not in names, "the next demo did not install"
