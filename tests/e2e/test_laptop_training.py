"""Recipes on a laptop, by the commands of their READMEs: a tiny model learns the task."""

import pytest

from benchmarks.recipe import NAMES, run_recipe


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_learns(recipe, tmp_path):
    if recipe == "reasoning-gym":
        pytest.importorskip("reasoning_gym", reason="needs requirements-recipes.txt")
    scores = run_recipe(recipe, tmp_path / "project")
    # its test set is easier than its training set: results/recipe_reasoning_gym.json
    gain = 0.05 if recipe == "reasoning-gym" else 0.2
    assert scores["before"] < 0.6 and scores["after"] > scores["before"] + gain, scores
