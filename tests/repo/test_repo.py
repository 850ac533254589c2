"""Rules of the whole repository: sizes of files and functions, unsafe calls, names that exist,
examples that parse.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.rules.sft_rules import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(
    [
        *ROOT.glob("megatron_rl/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
        *ROOT.glob("viewer/**/*.py"),
        *ROOT.glob("examples/**/*.py"),
    ]
)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".sbatch", ".cfg", ".yaml", ".yml", ""}
IGNORED = re.compile(
    r"runs|build|node_modules|__pycache__|.*\.egg-info|\.(?!ci$).*"
)  # directories that are not sources
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
PAPER_RECIPES = {
    "on_policy": (1, "none"),
    "off_policy_n2_r2": (2, "R2"),
    "off_policy_n4_r3": (4, "R3"),
    "off_policy_n8_r3": (8, "R3"),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_are_short():
    long = {
        relative(path): lines
        for path in CODE
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"longer than {MAX_FILE_LINES} lines"


def test_test_files_have_names_of_their_own():
    """Else pytest cannot collect both: two of one name, in folders that are no packages."""
    names = [
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_functions_are_short():
    long = [
        f"{relative(path)}:{node.lineno} {node.name}: {lines} lines"
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines"


def test_modules_say_their_job():
    silent = [
        relative(path)
        for path in CODE
        if (text := path.read_text()) and not ast.get_docstring(ast.parse(text))
    ]
    assert not silent, "no module docstring"


def test_sources_are_ascii():
    assert not [relative(path) for path in CODE if not path.read_text().isascii()]


# Unsafe calls -------------------------------------------------------------------------------------


def unsafe_calls(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every call that runs text or unpickles bytes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_pickle = re.fullmatch(
            r"(c?pickle|dill|cloudpickle|joblib|marshal)\.(loads?|Unpickler)", name
        )
        if name in ("eval", "exec", "os.system", "os.popen") or is_pickle:
            yield node.lineno, name
        elif name == "torch.load" and options.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        elif name.endswith(".load") and options.get("allow_pickle") == "True":
            yield node.lineno, f"{name} with allow_pickle=True"
        elif options.get("shell") == "True":
            yield node.lineno, f"{name} with shell=True"


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')", "exec(text)", "os.system('ls')", "pickle.loads(data)", "pickle.Unpickler(f)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
    ],
)  # fmt: skip
def test_unsafe_calls_are_recognised(source):
    assert list(unsafe_calls(source))


def test_safe_calls_pass():
    assert not list(
        unsafe_calls(
            "model.eval()\ntorch.load(p, weights_only=True)\nnp.load(p)\nsubprocess.run(['ls'])"
        )
    )


IN_THE_SANDBOX = "megatron_rl/reward/sandbox/programs/"
"""Programs that run the model's code, in a process that reaches nothing else."""


def test_no_unsafe_calls():
    found = [
        f"{relative(path)}:{line} {what}"
        for path in CODE
        for line, what in unsafe_calls(path.read_text())
        if not (what == "exec" and relative(path).startswith(IN_THE_SANDBOX))
    ]
    assert not found


def environment_clients(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every HTTP client that takes proxies from the environment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.fullmatch(
            r"httpx\.((Async)?Client|create_ssl_context|request|stream|get|post|put)",
            ast.unparse(node.func),
        ):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if options.get("trust_env") != "False":
                yield node.lineno, ast.unparse(node)


def test_no_proxy_of_the_environment_sees_a_key():
    assert list(environment_clients("httpx.Client(headers=key)\nhttpx.get(url)"))
    assert not list(environment_clients("httpx.Client(trust_env=False)\nclient.get(url)"))
    clients = [
        f"{relative(path)}:{line} {what}"
        for folder in ("megatron_rl", "tools", "viewer")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, what in environment_clients(path.read_text())
    ]
    assert not clients


# Portability --------------------------------------------------------------------------------------


def text_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        folders = path.relative_to(ROOT).parts[:-1]
        if (
            path.suffix in TEXT_SUFFIXES
            and not any(map(IGNORED.fullmatch, folders))
            and path.is_file()
        ):
            yield path


def test_no_paths_of_one_machine():
    """Neither this checkout's own place nor anybody's home directory."""
    places = [
        f"{ROOT}",
        *([f"{ROOT.parent}/"] if len(ROOT.parts) == 3 and ROOT.parent.name != "tmp" else []),
    ]
    pattern = re.compile("|".join([*map(re.escape, places), r"(?<![\w.])/(home|root|Users)/\w"]))
    found = [
        f"{relative(path)}:{number} {match.group()}"
        for path in text_files()
        if path != Path(__file__).resolve()
        if pattern.search(text := path.read_text(errors="replace"))
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found


# Imports inside functions -------------------------------------------------------------------------


@cache
def names_of(module: Path) -> set[str]:
    """What a module defines or imports at its top level, conditional blocks included."""
    found: set[str] = set()
    waiting = list(ast.parse(module.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            waiting += [
                child
                for child in ast.walk(node)
                if isinstance(child, ast.stmt) and child is not node
            ]
    return found


FOLDERS = {"megatron_rl_tools": ROOT / "tools", "megatron_rl_viewer": ROOT / "viewer"}


def missing_imports(source: str) -> list[str]:
    """Names that `from package.module import name` does not find in this repository."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        place = FOLDERS.get(node.module.partition(".")[0], ROOT).joinpath(*node.module.split("."))
        if node.module == "megatron_rl" or not (
            place.is_dir() or place.with_suffix(".py").is_file()
        ):
            continue  # another project's, or the public names, which are loaded on first use
        module = (
            place.with_suffix(".py")
            if place.with_suffix(".py").is_file()
            else place / "__init__.py"
        )
        known = names_of(module) if module.is_file() else set()
        for alias in node.names:
            is_module = (place / f"{alias.name}.py").is_file() or (place / alias.name).is_dir()
            if alias.name not in known and not is_module:
                missing.append(f"{node.module}.{alias.name}")
    return missing


def test_every_imported_name_exists():
    """Imports inside functions of tests and tools run late, some only in slow tests and in other
    commands.
    """
    folders = ("megatron_rl", "tools", "viewer", "tests", "examples", "benchmarks", "docs")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert not {
        relative(path): missing
        for path in sources
        if (missing := missing_imports(path.read_text()))
    }


def test_a_missing_name_is_found():
    assert missing_imports(
        "def f():\n    from tests.tiny import random_checkpoint, no_such_name\n"
    ) == ["tests.tiny.no_such_name"]
    assert not missing_imports("from tests import tiny\nfrom torch import nothing\n")


# Examples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.toml")), ids=relative)
def test_examples_parse(path):
    defaults = DEFAULTS if "\n[sft]\n" in path.read_text() else None
    config = load_config(path, [], defaults=defaults)
    assert config.run.name != "run", "an example names its run"


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_paper_recipes_have_the_papers_numbers(name):
    config = load_config(ROOT / f"examples/qwen3_30b_a3b/{name}.toml", [])
    num_mini_batches, replay = PAPER_RECIPES[name]
    assert (config.run.num_mini_batches, config.replay.mode) == (num_mini_batches, replay)
    assert config.run.prompts_per_step * config.run.group_size == 1024 * num_mini_batches
    loss = config.loss.switches
    assert (config.loss.name, loss.clip_low, loss.clip_high, loss.weight_high) == (
        "minirl",
        0.2,
        0.27,
        5.0,
    )
    assert (config.advantage_kind, config.rollout.max_response_tokens, config.eval.samples) == (
        "mean",
        32768,
        32,
    )


def test_paper_ablations_parse_and_change_what_their_row_says():
    """Every row of the README's table: its options after each of its files."""
    folder = ROOT / "examples/qwen3_30b_a3b"
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| `(--[^|`]+)` \|", (folder / "README.md").read_text(), re.M
    )
    assert len(rows) == 11
    for name, files, options in rows:
        for file in re.findall(r"`(\w+\.toml)`", files) or [
            path.name for path in folder.glob("off_policy*.toml")
        ]:
            config, plain = (
                load_config(folder / file, options.split()),
                load_config(folder / file, []),
            )
            assert ("R3" in name) == (config.replay.mode == "R3") and ("R2" in name) == (
                config.replay.mode == "R2"
            )
            assert ("length" in name) == (config.loss.name == "minirl_length_norm")
            assert ("- train-infer IS" in name) == (config.loss.name == "minirl_no_is")
            assert ("no clipping" in name) == (config.loss.name == "minirl_no_clip")
            assert config != plain, f"{name} changes nothing in {file}"


@pytest.fixture
def demo_command(tmp_path):
    """run.sh in a tree whose python and torchrun print their arguments: what would be started,
    without starting it.
    """
    for file in ("tiny_cpu/run.sh", "tiny_cpu/demo.toml", "tools_cpu/run.sh"):
        target = tmp_path / "examples" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / "examples" / file).read_bytes())
    for tool in ("python", "torchrun"):
        stub = tmp_path / ".venv/bin" / tool
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        stub.chmod(0o755)

    def run(
        *arguments: str, example: str = "tiny_cpu/demo.toml", **variables: str
    ) -> tuple[int, list[str]]:
        env = {"PATH": "/usr/bin:/bin", **variables}
        command = ["bash", str(tmp_path / f"examples/{example.split('/')[0]}/run.sh"), *arguments]
        words = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        ranks = int(words[words.index("--nproc_per_node") + 1])
        place = words.index("--config") + 1
        assert words[place].endswith(f"examples/{example}")
        return ranks, words[place + 1 :]

    return run


@pytest.mark.parametrize(
    ("variables", "ranks", "sizes"),
    [
        ({}, 2, (1, 1, 2, 1)),
        ({"TP": "2"}, 2, (2, 1, 1, 2)),
        ({"PP": "2"}, 2, (1, 2, 1, 1)),
        ({"TP": "2", "EP": "2"}, 2, (2, 1, 2, 1)),
        ({"TP": "2", "PP": "2", "EP": "2"}, 4, (2, 2, 2, 1)),
        ({"EP": "1"}, 2, (1, 1, 1, 1)),
        ({"EP": "4"}, 4, (1, 1, 4, 1)),
    ],
)
def test_demo_layouts_fit_their_ranks(demo_command, variables, ranks, sizes):
    started, overrides = demo_command(**variables)
    parallel = load_config(ROOT / "examples/tiny_cpu/demo.toml", overrides).parallel
    assert (started, (parallel.tp, parallel.pp, parallel.ep, parallel.expert_tp)) == (ranks, sizes)
    assert started % (parallel.tp * parallel.pp) == 0
    assert started % (parallel.expert_tp * parallel.ep * parallel.pp) == 0


def test_demo_variables_reach_the_configuration(demo_command):
    _, overrides = demo_command(
        "--optim.lr", "0.5", SEED="3", DTYPE="float32", STEPS="7", NAME="other"
    )
    config = load_config(ROOT / "examples/tiny_cpu/demo.toml", overrides)
    assert (config.run.seed, config.run.num_steps, config.run.name) == (3, 7, "other")
    assert (config.rollout.dtype, config.optim.lr) == ("float32", 0.5)
    assert config.model.path == Path(".cache/tiny_moe-3")
    assert config.data.train == Path(".cache/tiny_moe-3/train.jsonl")
    assert config.eval.sets == {"heldout": Path(".cache/tiny_moe-3/heldout.jsonl")}


def test_the_demo_with_a_tool_is_the_same_script(demo_command):
    ranks, overrides = demo_command(
        "--optim.lr", "0.5", example="tools_cpu/tools.toml", SEED="3", TP="2", NAME=""
    )
    config = load_config(ROOT / "examples/tools_cpu/tools.toml", overrides)
    assert (ranks, config.parallel.tp, config.optim.lr, config.run.name) == (
        2,
        2,
        0.5,
        "demo-tools",
    )
    assert config.model.path == Path(".cache/tiny_moe-tools-3") and config.agent.name
    assert config.eval.sets == {"heldout": Path(".cache/tiny_moe-tools-3/heldout.jsonl")}
