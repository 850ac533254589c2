"""The README of the 30B recipes starts them on 1, 2 and 4 nodes: its own blocks are run, with the
programs replaced by echo.
"""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.options import parse
from megatron_rl.plan.dry_run import report

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/qwen3_30b_a3b"
RECIPES = sorted(path.name for path in FOLDER.glob("*.toml"))
BLOCKS = dict(
    re.findall(
        r"^\*\*(\d) nodes?\*\*.*?```\n(.*?)```", (FOLDER / "README.md").read_text(), re.M | re.S
    )
)
STUBS = """
show() { printf '%s\\n' "$(printf ' %q' "$@")${ROLLOUT_URLS:+ urls $ROLLOUT_URLS}"; }
megatron-rl() { show megatron-rl "$@"; }
bash() { show bash "$@"; }
"""


def commands(nodes, recipe):
    """The command lines of a block, for one of the recipes, as the shell expands them."""
    script = STUBS + BLOCKS[nodes].replace("on_policy.toml", recipe)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return [line.partition(" urls ")[0].split() for line in done.stdout.splitlines()], done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("nodes", "servers"), [("1", "4 x 2"), ("2", "4 x 2"), ("4", "8 x 2")])
def test_the_blocks_of_the_readme_are_accepted(recipe, nodes, servers, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines, text = commands(nodes, recipe)
    (check,) = [line[2:] for line in lines if line[0] == "megatron-rl"]
    starts = [line for line in lines if line[1] == "examples/launch/train.sh"]
    arguments, overrides = parse(["--dry-run", *check])
    found = report(load_config(arguments.config, overrides), arguments.gpus)
    assert arguments.config.name == recipe and f"servers x devices: {servers}" in found
    assert "Memory of a GPU by phase" in found and "WARNING, more" not in found
    # what starts is what was checked
    ranks = 8 * len(starts)
    assert arguments.gpus == ranks and all(
        line[2] == f"examples/qwen3_30b_a3b/{recipe}" for line in starts
    )
    options = [*check[check.index("qwen3-30b-a3b") + 1 :]]
    if options[0] == "--rollout.urls":  # train.sh takes them from the environment
        assert text.count(f" urls {' '.join(options[1:])}") == len(lines)
    else:
        assert [line[3:] for line in starts] == [options]


def test_the_table_has_the_figures_of_the_dry_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    readme = (FOLDER / "README.md").read_text()
    for nodes in BLOCKS:
        check = next(
            line[2:] for line in commands(nodes, "on_policy.toml")[0] if line[0] == "megatron-rl"
        )
        arguments, overrides = parse(["--dry-run", *check])
        phases = re.findall(
            r"^#   (training|sampling): .* = ([\d.]+) GiB of",
            report(load_config(arguments.config, overrides), arguments.gpus),
            re.M,
        )
        row = next(line for line in readme.splitlines() if line.startswith(f"| {nodes} |"))
        for _, total in phases:
            assert f"{float(total):.1f} GiB" in row
