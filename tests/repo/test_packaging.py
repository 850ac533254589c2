"""What `pip install .` gives: dependencies that cover the imports and admit the pins, a wheel of
megatron_rl alone, the API.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.numpy import load_file, save_file

import megatron_rl
from megatron_rl.config.versions import PACKAGES, admits, package
from megatron_rl.models.known import KNOWN
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from tests.unit.batch.rollouts import make_tree
from tests.unit.tools.test_foreign_dumps import every, save_batch, save_samples
from tests.viewer_run import EXPERTS, LAYERS, TOP_K, write_run

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "megatron_rl": ROOT,
    "megatron_rl_tools": ROOT / "tools",
    "megatron_rl_viewer": ROOT / "viewer",
}
PROJECTS = {
    name: tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for name, folder in FOLDERS.items()
}
NEEDS = {
    name: [Requirement(line) for line in project["dependencies"]]
    for name, project in PROJECTS.items()
}
BASE = NEEDS["megatron_rl"]
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for project in PROJECTS.values()
    for name, lines in project.get("optional-dependencies", {}).items()
}
OPTIONAL = {"sglang", "transformer_engine", "apex", "modelopt", "wandb", "mlflow", "trackio"}
"""Imported only where they are installed, see config/versions.py."""
OF_RECIPES = {"bm25s", "datasets", "openai", "reasoning_gym"}
"""Imported by recipes alone, which say what to install."""
OF_ANOTHER = {"pydantic_core": "pydantic"}
"""Imported, and installed by what is declared."""
SIZES = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
"""Keys of config.json for the model of `write_run`."""


def pins(file: str) -> dict[str, set[str]]:
    """Name -> pinned versions of a requirements file."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line and not line.startswith("#"):
            need = Requirement(line)
            found.setdefault(canonicalize_name(need.name), set()).add(
                next(iter(need.specifier)).version
            )
    return found


@pytest.mark.parametrize("file", ["requirements-cpu.txt", "requirements.txt"])
def test_ranges_admit_the_pinned_versions(file):
    pinned = pins(file)
    for need in [*chain(*NEEDS.values()), *(need for needs in EXTRAS.values() for need in needs)]:
        for version in pinned.get(canonicalize_name(need.name), ()):
            assert need.specifier.contains(version), f"{need} does not admit {version} of {file}"


def test_every_dependency_is_pinned():
    names = {canonicalize_name(need.name) for need in chain(*NEEDS.values())}
    assert names <= pins("requirements-cpu.txt").keys()
    assert names - {"torch"} <= pins("requirements.txt").keys(), "the image has its own torch"


def test_ranges_agree_with_the_supported_versions():
    names = {each.name for each in PACKAGES}
    for need in BASE:
        if need.name in names:
            assert all(
                admits(package(need.name).versions, rule.version)
                for rule in need.specifier
                if rule.operator == ">="
            )


def imported(package: str) -> set[str]:
    """Top-level names of other packages that a package imports anywhere."""
    names: set[str] = set()
    for path in (FOLDERS[package] / package).rglob("*.py"):
        # the files of a recipe's folder, which is no package, import one another by name
        is_package = (path.parent / "__init__.py").is_file()
        beside = set() if is_package else {file.stem for file in path.parent.glob("*.py")}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names} - beside
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {(node.module or "").partition(".")[0]} - beside
    return names - set(sys.stdlib_module_names) - {package}


@pytest.mark.parametrize(
    ("package", "beside"),
    [
        ("megatron_rl", {"matplotlib"}),
        ("megatron_rl_tools", FOLDERS.keys()),
        ("megatron_rl_viewer", FOLDERS.keys()),
    ],
)
def test_everything_that_is_imported_is_declared(package, beside):
    """beside: what is imported where another package of ours is installed, and what those
    declare.
    """
    declared = {
        canonicalize_name(need.name)
        for name in {package, *beside} & NEEDS.keys()
        for need in NEEDS[name]
    }
    installed = packages_distributions()
    for name in imported(package) - OPTIONAL - OF_RECIPES - OF_ANOTHER.keys() - set(beside):
        distributions = {canonicalize_name(each) for each in installed.get(name, [name])}
        assert distributions & declared, (
            f"{name} is imported, and none of {distributions} is declared"
        )
    assert set(OF_ANOTHER.values()) <= {need.name for need in BASE}


def test_the_formatter_is_one_version_everywhere():
    (ruff,) = pins("requirements-cpu.txt")["ruff"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (rev,) = {repo["rev"] for repo in hooks if "ruff" in repo["repo"]}
    (need,) = [need for need in EXTRAS["dev"] if need.name == "ruff"]
    assert rev == f"v{ruff}" and str(need.specifier) == f"=={ruff}"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The three wheels, built in a copy by the installed setuptools: no network."""
    folder = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "runs", "build", "*.egg-info", "results", "node_modules", "tests"
    )
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    places = [str(source / path.relative_to(ROOT)) for path in FOLDERS.values()]
    subprocess.run([*command, "-w", str(folder), *places], check=True, timeout=300)
    return {name: folder / f"{name}-{megatron_rl.__version__}-py3-none-any.whl" for name in FOLDERS}


@pytest.mark.parametrize("package", FOLDERS)
def test_a_wheel_holds_its_package_alone(wheels, package):
    with zipfile.ZipFile(wheels[package]) as file:
        names = set(file.namelist())
        info = f"{package}-{megatron_rl.__version__}.dist-info"
        assert {name.partition("/")[0] for name in names} == {package, info}
        metadata = file.read(f"{info}/METADATA").decode().splitlines()
    needs = [Requirement(line[15:]) for line in metadata if line[:15] == "Requires-Dist: "]
    assert {need.name for need in NEEDS[package]} == {
        need.name for need in needs if need.marker is None
    }
    ours = [
        path.relative_to(FOLDERS[package])
        for path in (FOLDERS[package] / package).rglob("*")
        if path.is_file()
    ]
    assert {path.as_posix() for path in ours if "__pycache__" not in path.parts} <= names


def requirements(names: Iterable[str]) -> set[str]:
    """The distributions in question and all that they require here, without extras."""
    closure, waiting = set(), list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in closure:
            closure.add(name)
            needs = [Requirement(line) for line in distribution(name).requires or ()]
            waiting += [
                need.name
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return closure


def environment(folder: Path, wheels: Iterable[Path], names: Iterable[str]) -> tuple[Path, int]:
    """Make an environment with these wheels and links to the distributions `names` alone.

    Returns (its folder bin, bytes of the distributions).
    """
    venv.create(folder, with_pip=False)
    site, size = next(folder.glob("lib/python*/site-packages")), 0
    for name in names:
        for file in distribution(name).files or ():
            size += file.size or 0
            link = site / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(file.parts[0]))))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*command, "--no-index", *map(str, wheels)], check=True, timeout=300)
    return folder / "bin", size


def call(bin_folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [bin_folder / command[0], *command[1:]],
        cwd=bin_folder,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_trainer_alone_has_its_commands_and_names_the_others(wheels, tmp_path):
    """What it declares is enough to check a configuration, and nothing of tools or viewer is
    needed.
    """
    here, _ = environment(
        tmp_path / "env", [wheels["megatron_rl"]], requirements(need.name for need in BASE)
    )
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "qwen3-30b-a3b"\n[data]\ntrain = "none.jsonl"\n'
    )
    done = call(here, "megatron-rl", "dry-run", "--config", str(tmp_path / "run.toml"))
    assert done.returncode == 0 and "dtype bfloat16" in done.stdout, done.stderr
    done = call(
        here,
        "python",
        "-c",
        "import megatron_rl.train, megatron_rl.trainer.build, sys; print(*sys.modules)",
    )
    assert done.returncode == 0 and "matplotlib" not in done.stdout.split(), done.stderr
    project = ("new", str(tmp_path / "project"), "--recipe", "gsm8k", "--gpus", "8")
    done = call(here, "megatron-rl", *project)
    assert done.returncode == 0 and "next:" in done.stdout, done.stderr
    done = call(here, "python", str(tmp_path / "project/prepare.py"), "--help")
    assert done.returncode == 0 and "sets: train, test" in done.stdout, done.stderr
    done = call(here, "megatron-rl", "view")
    assert done.returncode == 2 and done.stderr.endswith("pip install ./viewer\n")


def test_the_viewer_beside_the_trainer_reads_a_run(wheels, tmp_path):
    run = write_run(tmp_path / "demo", steps=2, replicas=1)
    names = requirements(
        need.name for package in ("megatron_rl", "megatron_rl_viewer") for need in NEEDS[package]
    )
    here, _ = environment(
        tmp_path / "env", [wheels["megatron_rl"], wheels["megatron_rl_viewer"]], names
    )
    done = call(here, "megatron-rl", "report", str(run))
    assert done.returncode == 0 and done.stdout == f"{run / 'report.html'}\n", done.stderr
    done = call(
        here,
        "megatron-rl",
        "view",
        str(run),
        "--export",
        str(tmp_path / "out"),
        "--cache",
        str(tmp_path),
    )
    assert done.returncode == 0 and (tmp_path / "out/static/app.js").is_file(), done.stderr


@pytest.fixture(scope="module")
def tools_alone(wheels, tmp_path_factory) -> tuple[Path, int]:
    names = requirements(need.name for need in NEEDS["megatron_rl_tools"])
    return environment(
        tmp_path_factory.mktemp("alone") / "env", [wheels["megatron_rl_tools"]], names
    )


def write_dumps(folder: Path) -> list[Path]:
    """Two runs with findings, one of episodes; a text dump of verl, and .pt dumps of verl and
    slime.
    """
    broken = write_run(folder / "broken", steps=1)
    file = next(broken.glob("rollouts_*.safetensors"))
    tensors = load_file(file)
    next(values for name, values in tensors.items() if name.endswith(":tokens"))[-1] += 1
    save_file(tensors, file)
    trees = tuple(make_tree(f"p/{k}", seed=k) for k in range(3))
    group = RolloutGroup(Prompt("p", "", (1, 2, 3), ""), trees, np.zeros(3, np.float32))
    Recorder(folder / "episodes", save_tensors=True).record(1, [group])
    (folder / "text").mkdir()
    line = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 5}
    (folder / "text/5.jsonl").write_text(
        json.dumps(line) + "\n" + json.dumps(line | {"step": 4}) + "\n"
    )
    late = every("rollout_routed_experts", lambda routes: routes.roll(1, 0))
    slime = save_samples(folder / "slime", change=late)
    return [folder / "episodes", broken, folder / "text", save_batch(folder / "verl"), slime]


def check_with_everything(*arguments: str) -> subprocess.CompletedProcess[str]:
    """check-rollouts in this environment, which has the trainer."""
    start = (
        "import sys; from megatron_rl_tools.commands import check_rollouts;"
        " sys.exit(check_rollouts())"
    )
    folders = ":".join(map(str, FOLDERS.values()))
    command = [sys.executable, "-c", start, *arguments]
    env = {"PATH": "", "PYTHONPATH": folders}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_check_rollouts_needs_no_trainer(wheels, tools_alone, tmp_path):
    """What the tools declare is enough for every dump but .pt files, which need torch.

    The output is that of the trainer's environment, byte for byte.
    """
    names = requirements(["torch", *(need.name for need in NEEDS["megatron_rl_tools"])])
    (alone, _), (with_torch, _) = (
        tools_alone,
        environment(tmp_path / "env", [wheels["megatron_rl_tools"]], names),
    )
    assert not names & {"megatron-core", "transformers", "pydantic"}
    dumps = write_dumps(tmp_path)
    statuses = []
    for dump in dumps:
        expected = check_with_everything(str(dump))
        has_pt = any(dump.glob("*.pt"))
        done = call(with_torch if has_pt else alone, "check-rollouts", str(dump))
        assert (done.returncode, done.stdout, done.stderr) == (
            expected.returncode,
            expected.stdout,
            expected.stderr,
        )
        statuses.append(done.returncode)
        if has_pt:
            done = call(alone, "check-rollouts", str(dump))
            assert done.returncode == 2 and not done.stdout
            assert done.stderr.endswith(
                "5.pt: .pt files are read by torch, which is missing: pip install torch\n"
            )
    assert statuses == [1, 1, 1, 0, 1]


def test_the_canary_alone_says_that_it_needs_the_trainer(tools_alone, tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen3-30b-a3b"] | SIZES))
    done = call(tools_alone[0], "check-rollouts", str(run), "--model", str(tmp_path), "--json")
    report, plain = (
        json.loads(done.stdout),
        json.loads(check_with_everything(str(run), "--json").stdout),
    )
    assert report["unchecked"] == {"canary": "needs megatron_rl; in a checkout: pip install ."}
    assert (
        report["checks"] == [*plain["checks"], "canary"] and report["findings"] == plain["findings"]
    )
    assert done.returncode == (1 if plain["findings"] else 0)


def test_the_tools_alone_are_small_and_say_what_they_need(tools_alone):
    here, size = tools_alone
    assert size < 200e6
    start = (
        "import sys; from megatron_rl_tools.commands import *; sys.argv = ['convert', '--help'];"
        " sys.exit(convert())"
    )
    done = call(here, "python", "-c", start)
    assert (
        done.returncode == 2
        and done.stderr == "convert: needs megatron_rl; in a checkout: pip install .\n"
    )


def test_the_api_is_loaded_when_it_is_used():
    code = (
        "import sys, megatron_rl; assert set(megatron_rl.__all__) <="
        " set(dir(megatron_rl))\nmegatron_rl.load_config; print(sorted({'torch', 'megatron',"
        " 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_api_is_what_it_says():
    from megatron_rl.loss.policy import policy_loss

    assert (
        megatron_rl.policy_loss is policy_loss
        and megatron_rl.ReplayManager.__name__ == "ReplayManager"
    )
    assert megatron_rl.__doc__ and all(
        callable(getattr(megatron_rl, name)) for name in megatron_rl.__all__[2:]
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        megatron_rl.nothing  # noqa: B018
    with pytest.raises(
        AttributeError, match="moved: from megatron_rl_tools.convert.convert_hf import convert$"
    ):
        megatron_rl.convert  # noqa: B018
    named = re.findall(r"^    ([\w.]+)\(", megatron_rl.__doc__, re.MULTILINE)
    for place in named:
        module, _, name = place.rpartition(".")
        assert callable(getattr(import_module(module), name)), place
    assert len(named) == 6


def test_no_text_installs_an_extra_by_the_name_of_the_index():
    """The package is not in the index, where anybody may register its name: '.[wandb]' in a
    checkout.
    """
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text(errors="replace")
        for name in files
        if (ROOT / name).is_file() and name != "CHANGELOG.md"
    }
    named = re.compile(r"""\bmegatron[_-]rl\[[\w{},]+\]|pip install ["']?megatron[_-]rl\b""")
    assert not [
        name
        for name, text in texts.items()
        if named.search(text) and not name.endswith("test_packaging.py")
    ]
    extras = set(PROJECTS["megatron_rl"]["optional-dependencies"])
    used = {
        extra for text in texts.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)
    }
    assert "wandb" in used and used <= extras
