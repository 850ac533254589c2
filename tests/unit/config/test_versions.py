"""The supported versions: requirements, pyproject.toml and documentation agree with
config/versions.py.
"""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_rl.config import versions as supported
from megatron_rl.config.versions import (
    BAD_PAIRS,
    PACKAGES,
    SGLANG_TESTED,
    STACKS,
    admits,
    bad_pairs,
    lacks,
    least,
    package,
)
from megatron_rl.rollout.server.server_info import OLDEST_WITH_ROUTES

ROOT = Path(__file__).parents[3]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def rows(title: str) -> list[list[str]]:
    """The table of a section of docs/reference/versions.md."""
    section = (
        (ROOT / "docs/reference/versions.md")
        .read_text()
        .split(f"\n## {title}\n")[1]
        .split("\n## ")[0]
    )
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    return found[1:]


def test_stacks_are_within_their_own_ranges_and_have_no_bad_pair():
    for python, versions in STACKS.items():
        for name, version in versions.items():
            assert admits(supported.package(name).versions, version), name
        assert not list(bad_pairs({"python": python, **versions}))


def test_this_environment_is_a_tested_one():
    installed = {name: metadata.version(name) for name in STACKS[HERE]}
    assert {name: Version(version).public for name, version in installed.items()} == STACKS[HERE]


@pytest.mark.parametrize(
    "file", ["requirements.txt", "requirements-cpu.txt", "requirements-sglang.txt"]
)
def test_requirements_agree(file):
    """A pin is that of its Python's stack; a range stays within the supported one."""
    for need in requirements(file):
        for python, stack in STACKS.items():
            if need.marker is not None and not need.marker.evaluate({"python_version": python}):
                continue
            if need.name in stack:
                assert stack[need.name] in need.specifier, (need, python)
                assert all(
                    rule.version == stack[need.name]
                    for rule in need.specifier
                    if rule.operator == "=="
                ), (
                    need,
                    python,
                )
            lowest = [
                Version(rule.version) for rule in need.specifier if rule.operator in ("==", ">=")
            ]
            if need.name in [each.name for each in PACKAGES] and lowest:
                assert all(
                    admits(supported.package(need.name).versions, str(version))
                    for version in lowest
                ), need
            pinned = [rule.version for rule in need.specifier if rule.operator == "=="]
            assert not pinned or not list(
                bad_pairs({"python": python, **stack, need.name: pinned[0]})
            ), need


def test_pins_cover_every_stack():
    for python, stack in STACKS.items():
        pinned = {
            need.name: str(next(iter(need.specifier)).version)
            for file in ("requirements-cpu.txt", "requirements-sglang.txt")
            for need in requirements(file)
            if need.marker is None or need.marker.evaluate({"python_version": python})
        }
        assert {name: pinned[name] for name in stack} == stack


def test_python_range_agrees():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted = [
        f"3.{minor}"
        for minor in range(8, 20)
        if f"3.{minor}" in SpecifierSet(project["requires-python"])
    ]
    assert admitted == list(STACKS)
    install = (ROOT / "tools/install.sh").read_text()
    assert f"({', '.join(version.replace('.', ', ').join('()') for version in STACKS)})" in install
    assert re.search(rf"python3 {' '.join('python' + version for version in STACKS)}", install)


def test_install_refuses_an_environment_of_another_python(tmp_path):
    """make install PYTHON=...

    where the environment is made of another one: nothing is installed.
    """
    other = next(python for python in STACKS if python != HERE)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *print*) echo {other};; *install*) exit 99;; esac\n'
    )
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "VENV": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "tools/install.sh"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"has Python {other}" in done.stderr and f"make install VENV=.venv-{HERE}" in done.stderr


def test_a_stack_without_interpreter_is_reported_as_skipped():
    done = subprocess.run(
        ["bash", "tools/test_stacks.sh", "3.99"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "") and done.stderr.startswith(
        "SKIPPED: Python 3.99"
    )


def test_servers_are_refused_below_the_range():
    assert least("sglang") == OLDEST_WITH_ROUTES
    assert lacks("0.5.21") == [] == lacks("own-build")
    assert [line.split()[1] for line in lacks("0.5.19")] == ["0.5.20", "0.5.21"]


def test_the_stacks_serve_with_a_tested_sglang():
    assert {stack["sglang"] for stack in STACKS.values()} == {SGLANG_TESTED[0]}
    page = (ROOT / "docs/reference/versions.md").read_text()
    assert all(
        version in page and admits(package("sglang").versions, version) for version in SGLANG_TESTED
    )


def test_page_lists_the_same_versions():
    names = [["Python", "megatron-core", "SGLang", "torch", "transformers"]]
    tested = (ROOT / "docs/reference/versions.md").read_text()
    assert " | ".join(names[0]) in tested
    order = ("megatron-core", "sglang", "torch", "transformers")
    assert rows("Tested") == [
        [python, *(stack[name] for name in order)] for python, stack in STACKS.items()
    ]
    ranges = {row[0]: "" if row[1] == "any" else row[1] for row in rows("Supported ranges")}
    assert {name: SpecifierSet(text) for name, text in ranges.items()} == {
        each.name: each.versions for each in PACKAGES
    }
    pairs = rows("Incompatible combinations")
    assert len(pairs) == len(BAD_PAIRS)
    for (first, second, _), pair in zip(pairs, BAD_PAIRS, strict=True):
        assert first.split()[0] == pair.first.name and second.split()[0] == pair.second.name
        for text, versions in ((first, pair.first.specifier), (second, pair.second.specifier)):
            listed = text.partition(" ")[2].replace("other than ", "!=").replace("any", "")
            assert re.findall(r"[\d.]+\d(?:\+cpu)?", listed) == re.findall(
                r"[\d.]+\d(?:\+cpu)?", text
            )
            assert sorted(re.findall(r"\d[\d.]*\d", listed)) == sorted(
                re.findall(r"\d[\d.]*\d", str(versions))
            )


def test_readme_names_versions_of_a_stack_only():
    known = {version for stack in STACKS.values() for version in stack.values()}
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"(?:megatron-core|SGLang) (\d+\.\d+\.\d+)", text)
    assert found and set(found) <= known


@pytest.mark.parametrize(
    ("installed", "second"),
    [
        ({"python": "3.11", "megatron-core": "0.19.2"}, "python"),
        (
            {"python": "3.11", "megatron-core": "0.16.1", "transformer-engine": "2.13.0+abc"},
            "transformer-engine",
        ),
        (
            {"python": "3.12", "megatron-core": "0.19.2", "nvidia-modelopt": "0.40.0"},
            "nvidia-modelopt",
        ),
        ({"python": "3.12", "transformers": "5.12.1", "tokenizers": "0.23.2"}, "tokenizers"),
        ({"python": "3.12", "sglang": "0.5.17", "torch": "2.13.0+cu130"}, "torch"),
        ({"python": "3.12", "sglang": "0.5.21", "torch": "2.12.0a0+nv26.05"}, "torch"),
        ({"python": "3.12", "torchvision": "0.28.0", "torch": "2.13.0+cpu"}, "torch"),
    ],
)
def test_bad_pairs_are_found(installed, second):
    (found,) = bad_pairs(installed)
    assert found.second.name == second and found.reason and found.remedy


def test_good_pairs_are_not():
    assert not list(
        bad_pairs(
            {"python": "3.12", "sglang": "0.5.21", "torch": "2.13.0+cu130", "torchvision": "0.28.0"}
        )
    )
    assert not list(
        bad_pairs(
            {"python": "3.12.1", "megatron-core": "0.19.2", "torch": "a-build", "sglang": "mine"}
        )
    )
    assert admits(SpecifierSet(">=0.16,<0.20"), "0.19.0rc1+local") and not admits(
        SpecifierSet(">=0.16,<0.20"), "0.20.0"
    )
