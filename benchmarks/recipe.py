"""Runs the commands of a recipe's README under "On a laptop", as a new user would, and prints what
the training run printed.

    python -m benchmarks.recipe search    # or agent, code, reasoning-gym

The project is made in runs/recipe_NAME, which must not exist.  `megatron-rl` and `python` are those
of this environment; reasoning-gym needs requirements-recipes.txt in it.  --model: a tiny model of
`make-tiny-model --task chat`, which takes minutes; the first command then finds that it is up to
date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.recipes import new

ROOT = Path(__file__).resolve().parents[1]
LAPTOP = re.compile(r"^## On a laptop\n.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = ("agent", "code", "reasoning-gym", "search")
KEPT = re.compile(r"step \d|eval|parity|reward|entropy|router_mismatch|steps in|WARNING|episode")
"""Lines of a training run that are printed."""
SCORE = re.compile(r"eval/test/avg@\d+")


def laptop_commands(recipe: str) -> list[str]:
    """Return the commands of the recipe's README, in order."""
    block = LAPTOP.search((new.recipes()[recipe] / "README.md").read_text())
    if block is None:
        raise ValueError(f"the README of the recipe {recipe} has no commands under 'On a laptop'")
    return block[1].splitlines()


def run_recipe(recipe: str, folder: Path, model: Path | None = None) -> dict[str, float]:
    """Make the project and run its commands; print their seconds and what the last one printed.

    Returns the held-out mean reward "before" and "after".  Raises RuntimeError for a command that
    fails, with the end of its output.
    """
    print(new.make_project(folder, recipe, None, None).splitlines()[0])
    if model:
        shutil.copytree(model, folder / "tiny")
    places = map(str, (ROOT, ROOT / "tools", ROOT / "viewer"))
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(places),
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    output = ""
    for command in laptop_commands(recipe):
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE
        )
        output = done.stdout
        print(f"{time.monotonic() - started:4.0f} s  {command}", flush=True)
        if done.returncode:
            raise RuntimeError(f"{command}: exit status {done.returncode}\n{output[-3000:]}")
    print("\n".join(line for line in output.splitlines() if KEPT.search(line)))
    return held_out((folder / "runs/laptop/metrics.jsonl").read_text())


def held_out(metrics: str) -> dict[str, float]:
    """Return the first and the last mean reward of the set "test" of the lines of metrics.jsonl."""
    rows = map(json.loads, metrics.splitlines())
    # the bounds of its confidence interval have a suffix
    values = [row[key] for row in rows for key in row if SCORE.fullmatch(key)]
    return {"before": values[0], "after": values[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=NAMES)
    parser.add_argument("--model", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    recipe = arguments.recipe
    started = time.monotonic()
    scores = run_recipe(recipe, ROOT / f"runs/recipe_{recipe}", arguments.model)
    minutes = (time.monotonic() - started) / 60
    print(
        f"{recipe}: held-out reward {scores['before']:.2f} -> {scores['after']:.2f},"
        f" {minutes:.1f} minutes in all"
    )


if __name__ == "__main__":
    main()
