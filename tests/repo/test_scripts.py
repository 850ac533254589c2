"""Shell scripts and the lists of requirements: all are linted, they agree with one another; and the
Slurm job on stubs.
"""

import importlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from megatron_rl.config.rules.server_rules import is_url
from tools import image_packages

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    ".ci/run",
    "examples/**/*.sh",
    "examples/**/*.sbatch",
    "megatron_rl/recipes/*/*.sh",
    "tools/**/*.sh",
)
SCRIPTS = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def test_every_script_is_linted_and_stops_at_an_error():
    marked = {
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts)
        if path.relative_to(ROOT).parts[0] not in ("runs", "build")
        and path.read_bytes()[:19] == b"#!/usr/bin/env bash"
    }
    assert marked == set(SCRIPTS), "in SCRIPTS, and in the Makefile's lint"
    careless = [path for path in SCRIPTS if "set -euo pipefail" not in path.read_text()]
    assert not careless
    rule = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "bin/shellcheck" in line
    )
    assert {path for pattern in rule.split()[1:] for path in ROOT.glob(pattern)} == set(SCRIPTS)


def test_addresses_as_serve_prints_them_are_all_trained_with():
    words = "http://a:1\nhttp://b:2  http://c:3\n"
    env = {"PATH": os.environ["PATH"], "PYTHON": "echo", "ROLLOUT_URLS": words}
    script = ROOT / "examples/launch/train.sh"
    done = subprocess.run(["bash", script, "some.toml"], env=env, capture_output=True, text=True)
    assert (
        done.returncode == 0
        and f"some.toml --rollout.urls {' '.join(words.split())}\n" in done.stdout
    ), done.stderr


def test_serve_has_the_nccl_settings_of_ranks_that_broadcast(tmp_path):
    """Both form one communicator; the user's values are kept.  train.sh leaves them to the program,
    which knows whether the run has such a communicator.
    """
    for variables, expected in (({}, ["0", "0"]), ({"NCCL_NVLS_ENABLE": "1"}, ["0", "1"])):
        stub = tmp_path / "python"
        stub.write_text(
            f'#!/bin/bash\necho "$NCCL_CUMEM_ENABLE $NCCL_NVLS_ENABLE" >{tmp_path}/seen\n'
        )
        stub.chmod(0o755)
        env = {"PATH": os.environ["PATH"], "PYTHON": str(stub), **variables}
        train = ROOT / "examples/launch/train.sh"
        subprocess.run(["bash", train, "some.toml"], env=env, check=True)
        assert (tmp_path / "seen").read_text().split() == list(variables.values())
        (tmp_path / "seen").unlink()
        serve(tmp_path, "127.0.0.1", {"SGLANG_PYTHON": str(stub), **variables})
        assert (tmp_path / "seen").read_text().split() == expected


def test_servers_leave_memory_for_a_weight_sync_unless_the_user_says_otherwise(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/bash\necho "$@" >{tmp_path}/seen\n')
    stub.chmod(0o755)
    for variables, expected in (({}, "0.8"), ({"MEM_FRACTION": "0.6"}, "0.6")):
        serve(tmp_path, "127.0.0.1", {"SGLANG_PYTHON": str(stub), **variables})
        seen = (tmp_path / "seen").read_text()
        assert f"--mem-fraction-static {expected} --moe-runner-backend triton " in seen


def test_scripts_work_from_any_directory(tmp_path):
    """A relative path is that of the user's directory; the package and its Python are those of the
    checkout.
    """
    stub = tmp_path / "stub"
    stub.write_text(
        f'#!/bin/bash\npwd >{tmp_path}/seen\necho "$PYTHONPATH" >>{tmp_path}/seen\necho "$@"'
        f" >>{tmp_path}/seen\n"
    )
    stub.chmod(0o755)
    (tmp_path / "mine").mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(stub),
        "SGLANG_PYTHON": str(stub),
        "DEVICE": "cpu",
        "HOST": "127.0.0.1",
    }
    for script, argument in (("train.sh", "my.toml"), ("serve.sh", "my_model")):
        command = [
            "bash",
            os.path.relpath(ROOT / "examples/launch" / script, tmp_path / "mine"),
            argument,
        ]
        subprocess.run(command, cwd=tmp_path / "mine", env=env, capture_output=True, timeout=60)
        folder, path, arguments = (tmp_path / "seen").read_text().splitlines()
        assert (folder, path) == (
            str(tmp_path / "mine"),
            str(ROOT),
        ) and f" {argument} " in f"{arguments} ", script


# Requirements -------------------------------------------------------------------------------------

PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[\w+\])?==(\S+?)(?:; python_version (<|>=) \"3\.12\")?")


def pins(name: str) -> dict[tuple[str, str], str]:
    """(package, condition on Python's version) -> version.  Every line must be one exact pin."""
    lines = [line.split(" #")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = {}
    for line in lines:
        if line and not line.startswith(("#", "-")):
            match = PIN.fullmatch(line)
            assert match, f"{name}: not an exact pin: {line}"
            found[match[1].lower().replace("_", "-"), match[3] or ""] = match[2]
    return found


def test_requirements_agree():
    """What two environments share has one version: the image's for GPUs, the laptop's, the
    servers', and install.sh's.
    """
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    shared = gpu.keys() & cpu.keys()
    assert len(shared) >= 15
    assert {key: gpu[key] for key in shared} == {key: cpu[key] for key in shared}
    assert "grep '^sglang==' requirements-sglang.txt" in (ROOT / "tools/install.sh").read_text()


def test_the_image_brings_its_own_torch():
    """No list for the image may name what the image was built around, and Python's range covers the
    images' 3.12.
    """
    gpu = {name for name, _ in pins("requirements.txt")}
    assert not gpu & {
        "torch",
        "torchvision",
        "triton",
        "transformer-engine",
        "apex",
        "flash-attn",
        "nvidia-nccl-cu13",
    }
    assert (
        "<3.13"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )


def test_packages_of_the_image_are_frozen_and_every_change_is_seen(tmp_path, monkeypatch, capsys):
    image = {
        "torch": "2.13.0a0+nv26.05",
        "pytorch_triton": "3.7",
        "transformer_engine": "2.9",
        "apex": "0.1",
        "numpy": "2.4",
    }
    served = {"sglang": "0.5.21", "sgl_kernel": "0.4", "flashinfer_python": "0.6"}
    assert len(image_packages.frozen(served)) == 3, "SGLang's image is built around them"
    lines = [
        "apex==0.1",
        "pytorch-triton==3.7",
        "torch==2.13.0a0+nv26.05",
        "transformer-engine==2.9",
    ]
    assert image_packages.frozen(image) == lines
    assert not image_packages.differences(
        lines, image_packages.frozen(image | {"numpy": "2.5", "rich": "15"})
    )
    replaced = image_packages.frozen(image | {"torch": "2.13.0", "nvidia-nccl-cu13": "2.28"})
    assert image_packages.differences(lines, replaced) == [
        "nvidia-nccl-cu13==2.28: is installed now", "torch==2.13.0: is installed now",
        "torch==2.13.0a0+nv26.05: was replaced or removed",
    ]  # fmt: skip
    monkeypatch.setattr(image_packages, "frozen", lambda installed: lines)
    assert image_packages.main([]) == 0 and capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr(image_packages, "frozen", lambda installed: lines[1:])
    assert image_packages.main([]) == 1 and "apex is not installed" in capsys.readouterr().err
    assert image_packages.main(["--absent", "apex"]) == 0
    (tmp_path / "before").write_text("\n".join(lines) + "\n")
    assert image_packages.main(["--same", str(tmp_path / "before")]) == 1


# Slurm --------------------------------------------------------------------------------------------

STUBS = {
    "scontrol": (
        """if [[ $1 == show ]]; then seq -f 'n%g' "$SLURM_NNODES"; else echo "$@" >>"$LOG"; fi"""
    ),
    "curl": (
        """for i in $(seq 400); do
    if grep -q 'servers ready' "$LOG"; then exit 0; fi
    sleep 0.05
done
exit 1"""
    ),
    "srun": (
        """name="${*: -1}"; echo "srun $*" >>"$LOG"
case "$*" in
    *train.sh*) line="URLS $ROLLOUT_URLS NNODES $NNODES RANKS $RANKS_PER_NODE"
        echo "$line MASTER $MASTER_ADDR JOB $JOB_ID" >>"$LOG"
        trap 'exit 85' USR1
        if [[ "$STATUS" == signal ]]; then
            kill -USR1 "$PPID"
            for i in $(seq 100); do sleep 0.1; done
        fi
        exit "$STATUS" ;;
    *) trap 'echo servers stopped >>"$LOG"; exit 143' TERM
        echo servers ready >>"$LOG"; for i in $(seq 300); do sleep 0.1; done ;;
esac"""
    ),
}


@pytest.fixture
def slurm(tmp_path):
    """The job on a cluster of stubs: (exit status, what was called)."""
    for name, body in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/usr/bin/env bash\n{body}\n")
        stub.chmod(0o755)

    def job(**variables: str) -> tuple[int, str]:
        log = tmp_path / "log"
        log.write_text("")
        env = {
            "PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(log), "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_NNODES": "4",
            "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "7", "SGLANG_API_KEY": "key",
            **variables,
        }  # fmt: skip
        command = ["bash", "examples/launch/slurm.sbatch", "some.toml", "--run.seed", "3"]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, log.read_text()

    return job


def test_the_slurm_job_starts_both_halves_and_keeps_the_status(slurm):
    status, log = slurm(STATUS="87")
    assert status == 87 and "requeue" not in log and "servers stopped" in log
    assert (
        "--nodes=2 --ntasks=2 --nodelist=n3,n4" in log
        and "--nodes=2 --ntasks=2 --nodelist=n1,n2" in log
    )
    assert log.count("http://n3:3000") == 4 and "http://n4:30003" in log, (
        "four servers of two GPUs on a node"
    )
    assert "NNODES 2 RANKS 8 MASTER n1 JOB 7.0" in log and "train.sh some.toml --run.seed 3" in log


def test_a_preempted_slurm_job_is_queued_again(slurm):
    # the ranks got the signal; the job's script did, which hands it on
    for how in ("85", "signal"):
        status, log = slurm(STATUS=how, TRAIN_NODES="4")
        assert status == 85 and "requeue 7" in log
    assert log.count("--nodelist=n1,n2,n3,n4") == 2, "both halves on every node"
    assert "NNODES 4 RANKS 4" in log and "http://n4:30001" in log and "http://n4:30002" not in log


def test_a_slurm_job_of_one_node_has_both_halves_on_it(slurm):
    status, log = slurm(STATUS="0", SLURM_NNODES="1")
    assert status == 0 and log.count("--nodes=1 --ntasks=1 --nodelist=n1 ") == 2
    assert "NNODES 1 RANKS 4 MASTER n1" in log and log.count("http://n1:3000") == 2
    for number in ("0", "5"):
        assert slurm(STATUS="0", TRAIN_NODES=number) == (2, "")


def test_a_slurm_job_with_an_image_starts_both_halves_in_it(slurm):
    _, log = slurm(STATUS="0", IMAGE="rl.sqsh")
    assert log.count(f"--container-image=rl.sqsh --container-mounts={ROOT}:{ROOT},/dev/shm:") == 2
    assert log.count(f" --container-workdir={ROOT} ") == 2
    assert "--container" not in slurm(STATUS="0")[1]


# Benchmarks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem
)
def test_a_benchmark_imports_and_its_docstring_has_its_command(path):
    """Nothing else runs the benchmarks, so a renamed module of the package would break them
    unnoticed.
    """
    module = importlib.import_module(f"benchmarks.{path.stem}")
    if hasattr(module, "main"):
        assert (
            f"benchmarks/{path.name}" in module.__doc__
            or f"benchmarks.{path.stem}" in module.__doc__
        )


# Servers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "key"), [("127.0.0.1", None), ("127.0.0.1", "it's"), ("10.0.0.1", "it's")]
)
def test_serve_passes_the_key_in_a_file(tmp_path, host, key):
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/bash\nwhile [[ "$1" != --config ]]; do shift; done\ncp "$2" {tmp_path}/seen.yaml\n'
    )
    stub.chmod(0o755)
    status, errors = serve(
        tmp_path, host, {"SGLANG_PYTHON": str(stub)} | ({"SGLANG_API_KEY": key} if key else {})
    )
    assert status == 1 and "a server has ended" in errors, "the stub ends, which stops serve.sh"
    api_key = "api-key: 'it''s'\n" if key else ""  # YAML doubles a quote inside quotes
    assert (tmp_path / "seen.yaml").read_text() == f"log-level: warning\n{api_key}"


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:30000"), ("fd00::2", "http://[fd00::2]:30000")],
)
def test_serve_prints_addresses_that_a_run_takes(tmp_path, host, url):
    variables = {"SGLANG_PYTHON": "/bin/true", "SGLANG_API_KEY": "key"}
    assert serve_output(tmp_path, host, variables).stdout == f"{url}\n"
    assert is_url(url)


def test_serve_needs_a_key_where_other_hosts_reach_the_servers(tmp_path):
    status, errors = serve(tmp_path, "10.0.0.1", {})
    assert status != 0 and "SGLANG_API_KEY: choose a key" in errors


def serve(folder: Path, host: str, variables: dict[str, str]) -> tuple[int, str]:
    """Status and standard error of serve.sh for one server."""
    done = serve_output(folder, host, variables)
    return done.returncode, done.stderr


def serve_output(
    folder: Path, host: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "HOST": host,
        "LOG_DIR": str(folder),
        "SERVER_GPUS": "0,1",
        **variables,
    }
    command = ["bash", str(ROOT / "examples/launch/serve.sh"), "model"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
