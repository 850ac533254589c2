"""What `pip install .` gives: dependencies that cover the imports and admit the pins, a wheel of megatron_rl alone, the API."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_rl
from megatron_rl.config.versions import PACKAGES, admits, package

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
OPTIONAL = {"sglang", "transformer_engine", "apex", "modelopt", "wandb", "mlflow", "trackio"}
"""Imported only where they are installed, see config/versions.py."""
OF_EXTRAS = {"fastapi": "view", "uvicorn": "view"}
"""Imported by a command that has its own extra."""
OF_ANOTHER = {"pydantic_core": "pydantic"}
"""Imported, and installed by what is declared."""


def pins(file: str) -> dict[str, set[str]]:
    """Name -> pinned versions of a requirements file."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line and not line.startswith("#"):
            need = Requirement(line)
            found.setdefault(canonicalize_name(need.name), set()).add(next(iter(need.specifier)).version)
    return found


@pytest.mark.parametrize("file", ["requirements-cpu.txt", "requirements.txt"])
def test_ranges_admit_the_pinned_versions(file):
    pinned = pins(file)
    for need in [*BASE, *(need for needs in EXTRAS.values() for need in needs)]:
        for version in pinned.get(canonicalize_name(need.name), ()):
            assert need.specifier.contains(version), f"{need} does not admit {version} of {file}"


def test_every_dependency_is_pinned():
    names = {canonicalize_name(need.name) for need in BASE}
    assert names <= pins("requirements-cpu.txt").keys()
    assert names - {"torch"} <= pins("requirements.txt").keys(), "the image has its own torch"


def test_ranges_agree_with_the_supported_versions():
    names = {each.name for each in PACKAGES}
    for need in BASE:
        if need.name in names:
            assert all(
                admits(package(need.name).versions, rule.version) for rule in need.specifier if rule.operator == ">="
            )


def imported() -> set[str]:
    """Top-level names of other packages that megatron_rl imports anywhere."""
    names: set[str] = set()
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"megatron_rl"}


def test_everything_that_is_imported_is_declared():
    declared = {canonicalize_name(need.name) for need in BASE}
    installed = packages_distributions()
    for name in imported() - OPTIONAL - OF_ANOTHER.keys() - OF_EXTRAS.keys():
        distributions = {canonicalize_name(each) for each in installed.get(name, [name])}
        assert distributions & declared, f"{name} is imported, and none of {distributions} is declared"
    assert set(OF_ANOTHER.values()) <= declared
    for name, extra in OF_EXTRAS.items():
        assert name in {need.name for need in EXTRAS[extra]}


def test_the_formatter_is_one_version_everywhere():
    (ruff,) = pins("requirements-cpu.txt")["ruff"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (rev,) = {repo["rev"] for repo in hooks if "ruff" in repo["repo"]}
    (need,) = [need for need in EXTRAS["dev"] if need.name == "ruff"]
    assert rev == f"v{ruff}" and str(need.specifier) == f"=={ruff}"


def test_the_wheel_holds_megatron_rl_alone(tmp_path):
    """Built in a copy, by the installed setuptools: no network."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info", "results", "node_modules")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"megatron_rl-{megatron_rl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        info = f"megatron_rl-{megatron_rl.__version__}.dist-info"
        assert {name.partition("/")[0] for name in names} == {"megatron_rl", info}
        assert "megatron-rl = megatron_rl.cli:main" in file.read(f"{info}/entry_points.txt").decode()
        needs = [
            Requirement(line[15:])
            for line in file.read(f"{info}/METADATA").decode().splitlines()
            if line[:15] == "Requires-Dist: "
        ]
    assert {need.name for need in BASE} <= {need.name for need in needs if need.marker is None}
    ours = {f"{path.relative_to(ROOT)}" for path in (ROOT / "megatron_rl").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names, "every file of the package is in the wheel"


def test_the_api_is_loaded_when_it_is_used():
    code = (
        "import sys, megatron_rl; assert set(megatron_rl.__all__) <= set(dir(megatron_rl))\n"
        "megatron_rl.load_config; print(sorted({'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_api_is_what_it_says():
    import megatron_rl.evaluate
    import megatron_rl.train
    from megatron_rl.loss.policy import policy_loss

    assert megatron_rl.policy_loss is policy_loss and megatron_rl.ReplayManager.__name__ == "ReplayManager"
    assert megatron_rl.__doc__ and all(callable(getattr(megatron_rl, name)) for name in megatron_rl.__all__[2:])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        megatron_rl.nothing  # noqa: B018
    seen = []
    for module, function in ((megatron_rl.train, "train"), (megatron_rl.evaluate, "evaluate_checkpoint")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, function, lambda *arguments, **options: seen.append((arguments, options)))
            getattr(megatron_rl, module.__name__.rpartition(".")[2])("config", out=1)
    assert seen == [(("config",), {"out": 1})] * 2


def test_no_text_installs_an_extra_by_the_name_of_the_index():
    """The package is not in the index, where anybody may register its name: '.[view]' in a checkout."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text(errors="replace")
        for name in files
        if (ROOT / name).is_file() and name != "CHANGELOG.md"
    }
    named = re.compile(r"""\bmegatron[_-]rl\[[\w{},]+\]|pip install ["']?megatron[_-]rl\b""")
    assert not [name for name, text in texts.items() if named.search(text) and not name.endswith("test_packaging.py")]
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    used = {extra for text in texts.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert {"view", "wandb"} <= used <= extras
