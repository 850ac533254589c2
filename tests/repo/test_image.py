"""The GPU image: its steps on a stand-in for Python, and the comparison of NCCL versions."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.repo.test_scripts import pins
from tools import nccl_versions
from tools.nccl_versions import NcclEnvironment, difference

ROOT = Path(__file__).resolve().parents[2]
TRAINER = NcclEnvironment("python", "2.13.0a0+nv26.05", "2.30.1", "/usr/lib/libnccl.so.2")
SERVER = NcclEnvironment(
    "/opt/sglang/bin/python", "2.13.0+cu130", "2.29.7", "/opt/sglang/lib/libnccl.so.2"
)

PYTHON = """#!/bin/bash
# records its arguments and PIP_CONSTRAINT; `-m venv FOLDER` puts it there
echo "$* PIP_CONSTRAINT=${PIP_CONSTRAINT-none}" >>"$RECORD"
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [[ "$1" == tools/nccl_versions.py ]]; then exit "${NCCL_STATUS:-0}"; fi
if [[ "$1" == -c ]]; then echo "${SGLANG_VERSION:-}"; fi
"""


@pytest.fixture
def build(tmp_path):
    """build(*steps, **environment) -> (exit status, recorded calls)."""
    shutil.copytree(
        ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__")
    )
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*steps: str, **environment: str) -> tuple[int, list[str]]:
        record = tmp_path / "record"
        record.write_text("")
        env = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(python),
            "SGLANG": str(tmp_path / "sglang"),
            "RECORD": str(record),
        }
        env |= {"PIP_CONSTRAINT": "/etc/pip/constraint.txt", **environment}
        done = subprocess.run(
            ["bash", tmp_path / "tools/build_image.sh", *steps],
            env=env,
            capture_output=True,
            text=True,
        )
        return done.returncode, record.read_text().splitlines()

    return run


def test_no_pip_sees_the_constraints_of_the_base_image(build):
    status, calls = build("all")
    installs = [call for call in calls if call.startswith("-m pip install")]
    assert status == 0 and len(installs) == 3
    assert all(call.endswith("PIP_CONSTRAINT=none") for call in installs)
    assert "-r requirements-sglang.txt" in installs[0]
    assert (
        "-c constraints.txt -r requirements.txt" in installs[1]
        and "--no-deps -e . -e ./tools -e ./viewer" in installs[2]
    )
    assert (
        any("image_packages.py --same" in call for call in calls)
        and "megatron_rl.cli doctor --build" in calls[-1]
    )


def test_another_nccl_for_the_servers(build):
    _, calls = build("servers", SERVER_NCCL="nvidia-nccl-cu13==2.30.1")
    assert "--no-deps nvidia-nccl-cu13==2.30.1 PIP_CONSTRAINT=none" in calls[-1]


def test_the_build_stops_where_nccl_differs(build):
    status, calls = build("check", NCCL_STATUS="1")
    assert status == 1 and not any("doctor" in call for call in calls)
    status, calls = build("check", NCCL_STATUS="1", CHECK_NCCL="0")
    assert status == 0 and "doctor" in calls[-1]


def test_unknown_steps_are_named(build):
    assert build("server") == (2, [])


def test_the_shared_environment_is_that_of_the_pinned_sglang(build, tmp_path):
    """The servers' interpreter is at the path that scripts name, and is the trainer's."""
    (pin,) = re.findall(r"^sglang==(.*)$", (ROOT / "requirements-sglang.txt").read_text(), re.M)
    shutil.copy(ROOT / "requirements-sglang.txt", tmp_path)
    status, _ = build("shared", SGLANG_VERSION=pin)
    assert status == 0
    wrapper = (tmp_path / "sglang/bin/python").read_text()
    assert wrapper == f'#!/bin/sh\nexec {tmp_path / "python"} "$@"\n'
    assert build("shared", SGLANG_VERSION=f"{pin}+cu130")[0] == 0
    assert build("shared", SGLANG_VERSION=f"{pin}9")[0] == 1, "another release"


def test_transformer_engine_is_built_for_the_torch_of_the_image(build):
    status, calls = build("engine")
    assert status == 0
    assert calls[0].startswith("tools/image_packages.py --absent transformer-engine apex ")
    assert "-c constraints.txt --no-build-isolation -r requirements-te.txt" in calls[-1]
    _, calls = build("trainer", ABSENT="apex")
    assert calls[0].startswith("tools/image_packages.py --absent apex ")


def test_the_image_on_sglang_has_the_pins_of_the_requirements():
    text = (ROOT / "Dockerfile.sglang").read_text()
    (pin,) = re.findall(r"^sglang==(.*)$", (ROOT / "requirements-sglang.txt").read_text(), re.M)
    assert f"ARG SGLANG_TAG=v{pin}-cu130\nFROM lmsysorg/sglang:${{SGLANG_TAG}}\n" in text
    assert "-runtime" not in re.sub(r"^#.*$", "", text, flags=re.M), "nvcc builds the extension"
    steps = " ".join(re.findall(r"^RUN .*bash tools/build_image.sh (.*)$", text, re.M))
    assert steps == "shared engine trainer project check"
    assert "CHECK_NCCL=0 bash" in text and "ABSENT=apex bash" in text
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", text, re.M)).split()
    assert all((ROOT / name).exists() for name in copied)
    engine = pins("requirements-te.txt")
    assert len(engine) == 3 and len(set(engine.values())) == 1, "one version of all three parts"
    assert not {name for name, _ in engine} & {name for name, _ in pins("requirements.txt")}


def test_the_pins_of_the_trainer_fit_sglangs_own():
    """In one environment pip would replace a package that SGLang needs in another version."""
    trainer = {name: version for (name, _), version in pins("requirements.txt").items()}
    trainer |= {name: version for (name, _), version in pins("requirements-te.txt").items()}
    needed = [Requirement(line) for line in metadata.requires("sglang") or ()]
    shared = [
        (need, trainer[name])
        for need in needed
        if need.marker is None or need.marker.evaluate({"extra": ""})
        if (name := need.name.lower().replace("_", "-")) in trainer
    ]
    assert {"transformers", "tokenizers"} <= {need.name for need, _ in shared}
    assert not [str(need) for need, version in shared if not need.specifier.contains(version)]


def test_the_dockerfile_runs_every_step_once_and_in_order():
    called = re.findall(
        r"^RUN bash tools/build_image.sh (.*)$", (ROOT / "Dockerfile").read_text(), re.M
    )
    script = (ROOT / "tools/build_image.sh").read_text()
    (everything,) = re.findall(r"all \]\] && set -- (.*)$", script, re.M)
    assert " ".join(called) == everything


def test_equal_versions_are_accepted():
    assert difference([TRAINER, NcclEnvironment("b", "2.13.0", "2.30.1", "/b")]) == ""


def test_older_servers_get_the_trainers_nccl():
    text = difference([TRAINER, SERVER])
    assert "/opt/sglang/bin/python -m pip install --no-deps nvidia-nccl-cu13==2.30.1" in text
    assert "LD_PRELOAD=/usr/lib/libnccl.so.2 for the servers" in text


def test_an_older_image_gets_the_servers_nccl():
    text = difference(
        [NcclEnvironment("python", "2.9.0", "2.28.9", "/usr/lib/libnccl.so.2"), SERVER]
    )
    assert (
        "LD_PRELOAD=/opt/sglang/lib/libnccl.so.2 for the training ranks" in text
        and "pip install" not in text
    )
    assert "use 2.29.7 for both" in text


def stand_in(folder: Path, nccl: str) -> str:
    path = folder / f"python-{nccl}"
    found = json.dumps({"torch": "2.13.0+cu130", "nccl": nccl, "path": f"/{nccl}/libnccl.so.2"})
    path.write_text(f"#!/bin/bash\necho '{found}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_exit_status_is_1_where_they_differ(tmp_path, capsys):
    one, other = stand_in(tmp_path, "2.29.7"), stand_in(tmp_path, "2.29.10")
    assert nccl_versions.main([one, one]) == 0
    assert nccl_versions.main([one, other]) == 1
    assert "use 2.29.10 for both" in capsys.readouterr().err, "versions are compared as numbers"
    assert nccl_versions.main([one, "/bin/false"]) == 1
    assert "/bin/false: no version of NCCL" in capsys.readouterr().err


def test_the_library_that_torch_calls_is_asked():
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="no version of NCCL"):
            nccl_versions.probe(sys.executable)
        return
    found = nccl_versions.probe(sys.executable)
    assert found.nccl == ".".join(map(str, torch.cuda.nccl.version())), (
        "PyPI's torch runs with the one it was built for"
    )
    assert found.path.endswith("libnccl.so.2") and Path(found.path).is_file()
