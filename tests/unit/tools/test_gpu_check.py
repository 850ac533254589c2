"""gpu-check: limits, failures and steps that are not possible, on fake steps; the page; every real
step's command.
"""

import json
import re
import sys
import time
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.known import KNOWN
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl_tools.gpu_check import gpu_check, material, memory_steps, server_steps, speed
from megatron_rl_tools.gpu_check.result import Findings, StepOutcome
from megatron_rl_tools.gpu_check.step_runner import StepJob, run_job
from megatron_rl_tools.gpu_check.steps import PACKAGE, STEPS, StepPlace, job

WRITE = (
    "import json, pathlib; pathlib.Path('{folder}/result.json').write_text(json.dumps({outcome!r}))"
)
PASSED = {"verdict": "passed", "reason": "", "figures": {"tokens/s": 12.5}}


def run(tmp_path, code: str, *, outcome: dict | None = None):
    """The outcome of a step whose process writes `outcome`, then runs `code`."""
    first = WRITE.format(folder=tmp_path / "step", outcome=outcome) + "\n" if outcome else ""
    return run_job(StepJob("step", "a test", 1.0, [sys.executable, "-c", first + code]), tmp_path)


def test_the_result_of_a_step_is_what_it_wrote(tmp_path):
    report = run(tmp_path, "print('details')", outcome=PASSED)
    assert report.outcome == StepOutcome(**PASSED)
    assert (tmp_path / "step" / "log.txt").read_text() == "details\n"
    not_possible = {"verdict": "not possible", "reason": "needs a GPU", "figures": {}}
    assert run(tmp_path, "", outcome=not_possible).outcome == StepOutcome(**not_possible)


def test_a_step_over_its_limit_ends_with_its_children_and_keeps_its_figures(tmp_path):
    place, alive = tmp_path / "step", tmp_path / "alive"
    child = f"while true; do date +%s%N >{alive}; sleep 0.02; done & echo loading; sleep 60"
    code = f"printf '%s' '{json.dumps(PASSED)}' >{place}/result.json; {child}"
    report = run_job(StepJob("step", "a test", 0.03, ["bash", "-c", code]), tmp_path)
    assert (
        report.outcome.verdict == "failed"
        and report.outcome.reason == "over its limit of 0.03 minutes; loading"
    )
    assert report.outcome.figures == PASSED["figures"] and report.seconds < 30
    stopped_at = alive.read_text()
    time.sleep(0.2)
    assert alive.read_text() == stopped_at


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no kernel image')", "exit status 1: RuntimeError: no kernel image"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11: no output"),
        ("pass", "exit status 0: no output"),
    ],
)
def test_a_step_that_ends_without_a_result_failed(tmp_path, code, reason):
    assert run(tmp_path, code).outcome == StepOutcome("failed", reason)


def test_a_step_that_crashes_after_its_result_failed(tmp_path):
    outcome = run(tmp_path, "raise SystemExit('the watchdog ended it')", outcome=PASSED).outcome
    assert outcome == StepOutcome(
        "failed", "exit status 1: the watchdog ended it", PASSED["figures"]
    )


def test_an_old_result_is_not_read_again(tmp_path):
    run(tmp_path, "", outcome=PASSED)
    assert run(tmp_path, "").outcome == StepOutcome("failed", "exit status 0: no output")


def test_steps_do_not_inherit_the_variables_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    run(tmp_path, "import os; print(os.environ.get('WORLD_SIZE'))")
    assert (tmp_path / "step" / "log.txt").read_text() == "None\n"


def test_a_failed_step_does_not_stop_the_next_ones(tmp_path, monkeypatch, capsys):
    codes = {"doctor": "raise SystemExit('no GPU')", "logits": "", "speed": ""}

    def fake(step, place):
        outcome = (
            PASSED
            if step.name == "speed"
            else {**PASSED, "verdict": "not possible", "reason": "no | TE"}
        )
        code = (
            WRITE.format(folder=place.folder / step.name, outcome=outcome) + "\n" + codes[step.name]
        )
        return StepJob(step.name, step.purpose, step.minutes, [sys.executable, "-c", code])

    monkeypatch.setattr(gpu_check, "job", fake)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", "speed", "logits", "doctor"]
    assert gpu_check.main(arguments) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(each["name"], each["outcome"]["verdict"]) for each in found["steps"]] == [
        ("doctor", "failed"), ("logits", "not possible"), ("speed", "passed"),
    ]  # fmt: skip
    first = [(tmp_path / name).read_text() for name in ("report.md", "results.json")]
    assert "megatron-core" in found["machine"] and "commit" in found["machine"]
    text = (tmp_path / "report.md").read_text()
    assert "1 passed, 1 failed, 1 not possible" in text
    assert (
        re.search(r"\| logits \| not possible \| \d+ s of 10 min \| no \\\| TE \|", text)
        and "| tokens/s | 12.5 |" in text
    )
    assert "1 passed, 1 failed, 1 not possible" in capsys.readouterr().out
    assert gpu_check.main([*arguments[:-1]]) == 0, "not possible is no failure"
    assert "are kept as report_1.md and results_1.json" in capsys.readouterr().out
    assert gpu_check.main([*arguments[:-1]]) == 0
    assert [(tmp_path / f"{name}_1{end}").read_text() for name, end in
            (("report", ".md"), ("results", ".json"))] == first  # fmt: skip
    assert len(json.loads((tmp_path / "results_2.json").read_text())["steps"]) == 2


def test_no_folder_of_the_user_is_removed(tmp_path, monkeypatch, capsys):
    """A run may have the name of a step: --out runs, and runs/demo."""

    def fake(step, place):
        code = WRITE.format(folder=place.folder / step.name, outcome=PASSED)
        return StepJob(step.name, step.purpose, step.minutes, [sys.executable, "-c", code])

    monkeypatch.setattr(gpu_check, "job", fake)
    run_of_user = tmp_path / "demo" / "metrics.jsonl"
    run_of_user.parent.mkdir()
    run_of_user.write_text("{}")
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", "demo"]
    assert [gpu_check.main(arguments) for _ in range(2)] == [0, 0]
    assert run_of_user.read_text() == "{}"
    (tmp_path / "steps" / "demo" / "log.txt").unlink()
    assert gpu_check.main(arguments) == 2 and "holds no log.txt" in capsys.readouterr().err
    assert (tmp_path / "steps" / "demo" / "result.json").is_file()


def test_findings_name_what_failed_and_what_did_not_run():
    findings = Findings(not_run=["needs TransformerEngine"])
    findings.check(True, "unused")
    assert findings.outcome == StepOutcome("passed", "needs TransformerEngine")
    findings.check(False, "0.3 nats (limit 0.1)")
    assert findings.outcome == StepOutcome(
        "failed", "0.3 nats (limit 0.1); needs TransformerEngine"
    )


@pytest.mark.parametrize("step", [memory_steps.peak, speed.speed])
def test_a_step_that_measures_nothing_on_a_small_gpu_did_not_pass(tmp_path, monkeypatch, step):
    """An L4 of 24 GB is too small for every variant."""
    sizes = SimpleNamespace(total_memory=22 << 30)
    monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda _: sizes)
    spec = make_spec({**KNOWN["qwen3-30b-a3b"], "num_hidden_layers": 2})
    for module in (memory_steps, speed):
        monkeypatch.setattr(module, "real_layers", lambda *_: (tmp_path, spec))
    monkeypatch.setattr(speed, "uses_te", lambda cfg: True)
    outcome = step(StepPlace("cuda", tmp_path, False, Path(sys.executable)))
    assert (outcome.verdict, outcome.figures) == ("not possible", {})
    assert outcome.reason.count(" of 22 GiB") >= 2


def test_every_step_has_a_function_and_a_limit(tmp_path):
    assert sum(step.minutes for step in STEPS) <= 130
    for step in STEPS:
        module, _, function = step.target.partition(":")
        assert callable(getattr(import_module(f"{PACKAGE}.{module}"), function))
        command = job(step, StepPlace("cpu", tmp_path, True, sys.executable)).command
        assert command[1:4] == ["-m", f"{PACKAGE}.steps", step.name] and command[-1] == "--quick"
        assert command[command.index("--folder") + 1] == str(tmp_path / step.name)


def test_bad_arguments_are_named(tmp_path, capsys):
    for arguments, text in [
        (
            ["--device", "cpu", "--server-python", "/nowhere/python"],
            "--server-python /nowhere/python: no such file",
        ),
        (["--steps", "sped"], "invalid choice: 'sped'"),
    ]:
        with pytest.raises(SystemExit):
            gpu_check.main([*arguments, "--out", str(tmp_path)])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H200",
        "h200"), ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"), ("NVIDIA L4", None),
    ],
)  # fmt: skip
def test_the_planners_row_of_a_gpu_is_found_by_its_name(monkeypatch, device, row):
    monkeypatch.setattr(speed.torch.cuda, "get_device_name", lambda: device)
    assert speed.hardware_here() == (row and HARDWARE[row])


def test_the_demo_on_a_gpu_leaves_memory_to_the_trainer_and_has_kernels_for_its_heads(
    tmp_path, monkeypatch
):
    commands, models = [], []
    monkeypatch.setattr(server_steps, "sglang_version", lambda place: "0.5.21")
    monkeypatch.setattr(
        server_steps, "make_tiny_moe", lambda model, **settings: models.append(settings)
    )
    monkeypatch.setattr(
        server_steps.subprocess,
        "run",
        lambda command, **_: commands.append(command) or SimpleNamespace(returncode=0),
    )
    server_steps.demo(StepPlace("cuda", tmp_path, False, Path(sys.executable)))
    overrides = commands[0][commands[0].index("--config") + 2 :]
    cfg = load_config(server_steps.DEMO, overrides)
    assert cfg.rollout.server_args == ("--mem-fraction-static", "0.4")
    assert models == [{"head_dim": 64}]


def test_no_engine_is_left_where_the_speed_of_one_is_measured(tmp_path, monkeypatch):
    """Two of four Qwen3-30B layers are more than a GPU of 80 GB has."""
    alive = []

    class Engine:
        def __init__(self, *_, **__):
            alive.append(weakref.ref(self))
            self.core_config = SimpleNamespace(transformer_impl="local")

    monkeypatch.setattr(material, "Engine", Engine)
    monkeypatch.setattr(
        material, "make_parallel", lambda *_, **__: SimpleNamespace(destroy=lambda: None)
    )
    measured = []
    monkeypatch.setattr(
        speed, "measure", lambda *_: measured.append([each for each in alive if each() is not None])
    )
    speed.speed(StepPlace("cpu", tmp_path, False, Path(sys.executable)))
    assert measured and not any(measured)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quick_steps_on_the_cpu(tmp_path):
    """All steps with real models and a real server; those that need a GPU say so."""
    assert gpu_check.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    found = {
        each["name"]: each["outcome"]
        for each in json.loads((tmp_path / "results.json").read_text())["steps"]
    }
    assert {name for name, outcome in found.items() if outcome["verdict"] == "not possible"} == {
        "host-syncs",
        "memory",
        "full-layout",  # without a rehearsal
    }
    assert found.keys() == {step.name for step in STEPS}
