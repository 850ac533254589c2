"""The command megatron-rl: every command exists and answers, every help fits a screen, settings are
explained.
"""

import json
import os
import resource
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from megatron_rl import cli, commands
from megatron_rl.config import ConfigError, load_config
from megatron_rl.config.schema import SECTIONS
from megatron_rl.config.settings import explain
from megatron_rl.options import parse

ROOT = Path(__file__).parents[2]
SCREEN = 40
COMMANDS_OF_ONE_SCREEN = [f"megatron-rl {name}" for name in commands.installed()]
EXPECTED = """new sft train evaluate dry-run plan doctor convert quantize verify-replay replay-batch
    explain-mismatch gpu-check rehearse check-rollouts view report make-tiny-model launch settings
    play top trace"""
NAMES = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields]
HELPS = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
from megatron_rl import cli, commands

def answer(name, start):
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            status = start() or 0
        except SystemExit as stop:
            status = stop.code or 0
    text = out.getvalue()
    slow = sorted({"torch", "transformers", "megatron", "matplotlib", "sglang"} & set(sys.modules))
    lines = len(text.splitlines())
    values = [name, status, "usage: " in text, lines, slow, text[-300:]]
    print("ANSWER " + json.dumps(values), flush=True)

def script(run, place):
    sys.argv = [place, "--help"]
    run(place, run_name="__main__")

for name in commands.installed():
    answer(f"megatron-rl {name}", lambda: cli.main([name, "--help"]))
for name in ["megatron_rl.train", "megatron_rl.evaluate", "megatron_rl.launch"]:
    answer(f"python -m {name}", lambda: script(runpy.run_module, name))
"""


def run(*arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """python -m megatron_rl.cli, and its CPU seconds: they do not grow on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def test_every_command_is_listed_within_a_second():
    done, seconds = run("--help")
    assert done.returncode == 0 and seconds < 1
    assert (
        all(f"\n  {name} " in done.stdout for name in EXPECTED.split())
        and len(done.stdout.splitlines()) <= SCREEN
    )
    assert commands.installed().keys() == set(EXPECTED.split())


def test_the_packages_add_the_commands_that_the_command_line_expects():
    for folder, names in commands.PACKAGES.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["entry-points"][commands.GROUP].keys() == set(names)


def test_a_command_whose_package_is_missing_says_what_to_install(capsys, monkeypatch):
    core = {name: commands.installed()[name] for name in commands.PACKAGES["."]}
    monkeypatch.setattr(commands, "installed", lambda: core)
    assert cli.main(["view"]) == 2 and cli.main(["vieww"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "megatron-rl: the package of view is not installed; in a checkout: pip install ./viewer",
        "megatron-rl: unknown command 'vieww'; did you mean view?",
    ]
    assert cli.main(["--help"]) == 0
    assert (
        "not installed: report, view; in a checkout: pip install ./viewer"
        in capsys.readouterr().out
    )


def test_a_package_of_a_stranger_adds_a_command_and_one_that_fails_is_named(
    capsys, monkeypatch, tmp_path
):
    (tmp_path / "stranger.py").write_text(
        'def hello():\n    """Say hello."""\n    print("hello")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("hello", "stranger:hello", commands.GROUP),
        EntryPoint("bad", "nowhere:main", commands.GROUP),
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: points)
    monkeypatch.setattr(commands, "installed", commands.installed.__wrapped__)
    assert cli.main(["hello"]) == 0 and cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello" and "  hello  Say hello" in lines
    assert "  bad    cannot be loaded: No module named 'nowhere'" in lines


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert cli.main(["trian"]) == 2 and "did you mean train?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2 and "commands: new, sft, train, launch" in capsys.readouterr().err


def test_the_help_of_training_is_a_screen_and_imports_no_torch():
    done, seconds = run("train", "--help")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) <= SCREEN and seconds < 3
    assert all(
        option in done.stdout
        for option in ("--config", "--resume", "--only", "--from-rollouts", "--dry-run", "--gpus")
    )
    assert all(f"\n  {section} " in done.stdout for section in SECTIONS)
    assert "megatron-rl settings SECTION[.KEY]" in done.stdout


@pytest.fixture(scope="module")
def answers():
    """[name, status, has a usage, lines, slow modules that are imported by then, text] of every
    --help, in one process.
    """
    done = subprocess.run(
        [sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]


def test_the_help_of_no_command_imports_torch(answers):
    slow = {
        name: modules
        for name, _, _, _, modules, _ in answers
        if name.startswith("megatron-rl ") and modules
    }
    assert not slow, "the first of them imports it: parse the options before"
    assert answers[0][0] == "megatron-rl new" and len(answers) == len(EXPECTED.split()) + 3


def test_every_command_and_script_answers(answers):
    assert not [each for each in answers if each[1] != 0 or not each[2]]
    longer = [
        name
        for name, _, _, lines, *_ in answers
        if name in COMMANDS_OF_ONE_SCREEN and lines > SCREEN
    ]
    assert not longer, f"--help of {longer} does not fit a screen of {SCREEN} lines"


# Settings -----------------------------------------------------------------------------------------


def test_every_setting_is_explained():
    for name in NAMES:
        first, *rest = explain(name).splitlines()
        words = {line.split()[0]: line.split(maxsplit=1)[1:] for line in rest[:3]}
        assert (
            first == name and set(words) == {"type", "default", "meaning"} and all(words.values())
        ), name


def test_an_explanation_says_type_default_and_allowed_values():
    assert explain("run.group_size").splitlines()[1:3] == [
        "  type     integer, at least 1",
        "  default  8",
    ]
    assert explain("--replay.mode").splitlines()[1:3] == [
        '  type     "none" or "R2" or "R3"',
        '  default  "R3"',
    ]
    assert "list of: integer, greater than 0" in explain("parallel.layers_per_stage")
    assert "table of names and: path" in explain("eval.sets") and "none: required" in explain(
        "model.path"
    )
    assert '"raise" or "drop" or number, finite' in explain("reward.on-error")
    assert len(explain().splitlines()) <= SCREEN and all(
        section in explain() for section in SECTIONS
    )
    for section in SECTIONS:
        assert (
            len(explain(section).splitlines()) <= SCREEN + 8
            and max(map(len, explain(section).splitlines())) <= 140
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optin", "unknown section 'optin'; did you mean 'optim'?"),
        ("num_steps", "unknown section 'num_steps'; did you mean run.num_steps?"),
        ("optim.warmup", "unknown key optim.warmup; did you mean 'warmup_updates'?"),
        ("rollout.push", "rollout.push was renamed to rollout.weight_sync"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name, words):
    with pytest.raises(ConfigError) as caught:
        explain(name)
    assert str(caught.value) == words


def test_settings_as_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megatron-rl"])
    assert cli.main(["settings", "run.seed"]) == 0 and "default  0" in capsys.readouterr().out
    assert (
        cli.main(["settings", "run.sed"]) == 2 and "did you mean 'seed'?" in capsys.readouterr().err
    )


# Training -----------------------------------------------------------------------------------------


def test_options_of_sglang_reach_the_servers():
    _, overrides = parse(
        ["--rollout.server_args", "--tp-size", "2", "--enable-x", "--run.seed", "3", "--resume"]
    )
    cfg = load_config(None, overrides, {"model": {"path": "m"}, "data": {"train": "t"}})
    assert cfg.rollout.server_args == ("--tp-size", "2", "--enable-x")
    assert (cfg.run.seed, cfg.checkpoint.require) == (3, True)
    cfg = load_config(
        None,
        ["--rollout.server-args", "--a=0.5", "-b"],
        {"model": {"path": "m"}, "data": {"train": "t"}},
    )
    assert cfg.rollout.server_args == ("--a=0.5", "-b")


def test_a_dry_run_is_a_command_and_an_option(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "qwen3-30b-a3b"\n[data]\ntrain = "none.jsonl"\n'
    )
    outputs = [
        run(*command, "--config", str(tmp_path / "run.toml"))[0]
        for command in (["dry-run"], ["train", "--dry-run"])
    ]
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout and "dtype bfloat16" in outputs[0].stdout


def test_the_console_script_finds_modules_of_the_working_directory(tmp_path):
    scripts, project = tmp_path / "bin", tmp_path / "project"
    scripts.mkdir()
    project.mkdir()
    (project / "reward.py").write_text("def fine(prompt, response, label): ...\n")
    script = scripts / "megatron-rl"
    # as pip writes it; `settings` is replaced by an import, which takes no time
    script.write_text(
        "import sys\nfrom megatron_rl import cli, commands\n"
        "commands.load = lambda name: lambda: print(__import__('reward').__file__)\n"
        "sys.exit(cli.main())\n"
    )
    run = subprocess.run(
        [sys.executable, script, "settings"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == str(project / "reward.py"), run.stderr
