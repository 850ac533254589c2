"""examples/dose_map: its cells vary what the map's axes name and nothing else, and the map shows
the cells that ran.
"""

import json

import pytest

from examples.dose_map import map as dose_map
from examples.dose_map.cells import EXPERIMENT, INGREDIENTS, ROUNDINGS, STALENESS, place
from examples.experiments.analyse import interval
from examples.experiments.experiment import Cell
from examples.experiments.run import KEPT, cell_config
from examples.paper_tiny.cells import EXPERIMENT as PAPER_TINY

CELLS = list(EXPERIMENT.cells(list(EXPERIMENT.tables), [1]))
URLS = ["--rollout.urls", "http://127.0.0.1:1"]


def settings_of(cell):
    """The settings that may differ between cells, and those that may not."""
    cfg = cell_config(cell, URLS).model_dump(mode="json")
    varied = {
        "rounding": [cfg["rollout"].pop(key) for key in ("dtype", "quantize", "quantize_keep")],
        "loss": cfg.pop("loss"),
        "replay": cfg["replay"].pop("mode"),
        "steps": [
            *(cfg["run"].pop(key) for key in ("num_mini_batches", "num_steps", "prompts_per_step")),
            cfg["eval"].pop("every"),
            cfg["optim"].pop("lr"),
        ],
    }
    cfg["run"].pop("name")
    cfg["run"].pop("dir")
    return varied, cfg


def test_every_square_has_cells_of_one_experiment():
    assert len(CELLS) == len({cell.name for cell in CELLS}) == 58
    places = {
        place(rounding, updates, name)
        for rounding in ROUNDINGS
        for updates in STALENESS
        for name in INGREDIENTS
    }
    assert {(cell.table, cell.line) for cell in CELLS} == {
        where[1:] for where in places if where.experiment == EXPERIMENT.name
    }
    assert len(places) == 4 * (3 + 3 * 5)


@pytest.mark.parametrize("updates", STALENESS)
def test_a_row_and_an_ingredient_change_only_what_they_name(updates):
    reference, fixed = settings_of(Cell(PAPER_TINY, *place("fp8", updates, "weight")[1:], 1))
    for rounding in ROUNDINGS:
        for name in INGREDIENTS:
            where = place(rounding, updates, name)
            experiment = {"dose_map": EXPERIMENT, "paper_tiny": PAPER_TINY}[where.experiment]
            varied, others = settings_of(Cell(experiment, where.table, where.line, 1))
            assert others == fixed
            assert varied["steps"] == reference["steps"]
            assert (varied["rounding"] == reference["rounding"]) == (rounding == "fp8")
            is_same = updates == 1 and name in ("clip", "r2")
            assert (varied["replay"] == reference["replay"]) == (
                name not in ("r2", "r3") or is_same
            )


def test_an_ingredient_is_what_its_name_says():
    switches = {
        name: cell_config(Cell(EXPERIMENT, "bf16_n4", name, 1), URLS).loss.switches
        for name in INGREDIENTS
    }
    assert (switches["nothing"].weight, switches["nothing"].clip) == ("none", "none")
    assert {switches[name].weight for name in ("weight", "clip", "r2", "r3")} == {"total"}
    assert {name for name, spec in switches.items() if spec.clip != "none"} == {"clip"}


def write_cell(folder, name, seed, rewards, kl):
    columns = {column: [0.0] * len(rewards) for column in KEPT}
    columns["rollout/reward_mean"], columns["train/kl_mu_pi_k3"] = rewards, [kl] * len(rewards)
    cell = {
        "table": "bf16_n8",
        "line": name,
        "seed": seed,
        "outcome": "finished",
        "eval": {"0": 0.3},
        "columns": columns,
    }
    (folder / f"bf16_n8-{name}-{seed}.json").write_text(json.dumps(cell))


def test_the_map_shows_last_thirds_collapses_and_pairs_of_a_seed(tmp_path):
    cells = tmp_path / "cells"
    cells.mkdir()
    for seed, last in ((0, 0.5), (1, 0.7)):
        write_cell(cells, "clip", seed, [0.4] * 8 + [last] * 4, 1e-3)
        write_cell(cells, "weight", seed, [0.4] * 8 + [0.1] * 4, 1e-2)
    write_cell(cells, "weight", 2, [0.9] * 12, 1e-2)  # a seed without a pair
    runs = dose_map.Map(tmp_path)
    assert dose_map.reward_text(runs, ("bf16", 8), "clip") == "0.600, 0/2"
    assert dose_map.reward_text(runs, ("bf16", 8), "weight") == "0.367, 2/3"
    assert runs.differences(("bf16", 8), "weight", "clip") == pytest.approx([0.4, 0.6])
    assert dose_map.reward_text(runs, ("bf16", 4), "clip") == "-"
    assert interval([0.4, 0.6]) == "+0.500 +- 1.271"  # t of one degree of freedom: 12.71
    rows = dose_map.table_of_changes(runs).splitlines()
    (row,) = [row for row in rows if row.startswith("| bf16 | 8 |")]
    assert row == "| bf16 | 8 | - | +0.500 +- 1.271 | - | - | 1.0e-02 | - |"
    (row,) = [row for row in rows if row.startswith("| bf16 | 1 |")]
    assert row.split("|")[4:6] == [" same ", " same "]
    dose_map.draw(runs).savefig(tmp_path / "map.png", dpi=20)


def test_the_committed_map_is_that_of_the_committed_cells():
    results = EXPERIMENT.folder / "results"
    cells = dose_map.Map(results)
    assert (results / "map.md").read_text() == dose_map.tables(cells)
    assert all(cells.runs.values()), "every square has a run"
