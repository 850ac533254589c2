"""examples/lora_ranks: cells differ in what is trained and its rate, and the table shows the cells
that ran.
"""

import json

from examples.experiments.run import KEPT, cell_config
from examples.lora_ranks import compare
from examples.lora_ranks.cells import EXPERIMENT, HEAD, RANKS

CELLS = list(EXPERIMENT.cells(list(EXPERIMENT.tables), [1]))


def test_cells_differ_in_adapters_and_rate():
    others = []
    for cell in CELLS:
        cfg = cell_config(cell, ["--rollout.urls", "http://127.0.0.1:1"]).model_dump(mode="json")
        lora, rate = cfg.pop("lora"), cfg["optim"].pop("lr")
        assert lora["rank"] == RANKS[cell.table] and f"lr{rate:g}" == cell.line
        assert ("lm_head" in lora["targets"]) == (cell.table == HEAD)
        assert not lora["rank"] or lora["alpha"] == 2 * lora["rank"]
        cfg["run"].pop("name")
        others.append(cfg)
    assert len(CELLS) == 20 and all(cfg == others[0] for cfg in others)


def test_the_table_compares_the_best_rates_on_seeds_that_the_search_did_not_see(tmp_path):
    (tmp_path / "cells").mkdir()
    steps = EXPERIMENT.tables["full"].num_steps
    values = {("full", "lr0.0004"): 0.5, ("full", "lr0.0008"): 0.7, ("rank8", "lr0.004"): 0.6}
    for (table, line), value in values.items():
        for seed in (0, 1, 2):
            reward = [0.1] * (steps - steps // 3) + [value + 0.1 * seed * (table == "full")] * (
                steps // 3
            )
            columns = {name: [None] * steps for name in KEPT} | {"rollout/reward_mean": reward}
            cell = {"table": table, "line": line, "seed": seed, "outcome": "finished"}
            path = tmp_path / "cells" / f"{table}-{line}-{seed}.json"
            path.write_text(json.dumps(cell | {"columns": columns, "eval": {}}))
    search, comparison = compare.tables(tmp_path).split("# Comparison")
    assert "| every weight | 0.0008 | 0.700 | no |" in search
    rows = comparison.splitlines()[4:]
    assert rows[0].startswith("| every weight | 0.0008 | 2 | 0.850 (0.800 to 0.900) |")
    # -0.2 and -0.3: half of the interval is 12.71 x 0.05
    assert rows[1].endswith("| -0.250 +- 0.635 |") and len(rows) == 2


def test_the_stored_table_is_that_of_the_cells():
    results = EXPERIMENT.folder / "results"
    assert (results / "table.md").read_text() == compare.tables(results)
