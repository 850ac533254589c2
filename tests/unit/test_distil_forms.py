"""examples/distil_forms: cells differ in what they learn from, the age of rollouts and the rate;
the table shows the cells that ran.
"""

import json

from examples.distil_forms import compare
from examples.distil_forms.cells import (
    AGES,
    ALONE,
    ARMS,
    EXPERIMENT,
    FORMS,
    TEACHER,
    TOP_K,
    VOCAB_SIZE,
)
from examples.experiments.run import KEPT, cell_config

CELLS = list(EXPERIMENT.cells(list(EXPERIMENT.tables), [1]))


def test_cells_differ_in_what_they_learn_from_in_age_and_in_rate():
    others, seen = [], set()
    for cell in CELLS:
        cfg = cell_config(cell, ["--rollout.urls", "http://127.0.0.1:1"]).model_dump(mode="json")
        arm, _, age = cell.table.partition("_")
        teachers = cfg.pop("teachers")
        path = None if arm == "rewards" else str(EXPERIMENT.teacher_model)
        assert [teacher["path"] for teacher in teachers.values()] == [path] * (path is not None)
        assert list(teachers) == [TEACHER] * (path is not None)
        form = {"reverse": "reverse", "forward": "forward", "full": "reverse"}.get(arm, "token")
        assert cfg["loss"].pop("teacher_form") == form
        count = VOCAB_SIZE if arm == "full" else TOP_K
        assert form == "token" or cfg["loss"]["teacher_top_k"] == count
        cfg["loss"].pop("teacher_top_k")
        weight = cfg["advantage"].pop("weight")
        assert weight == (1.0 if arm in ("rewards", "mixed") else ALONE["weight"])
        assert cfg["rollout"].pop("max_staleness") == int(age or 0)
        assert f"lr{cfg['optim'].pop('lr'):g}" == cell.line
        cfg["run"].pop("name")
        others.append(cfg)
        seen.add((arm, int(age or 0)))
    assert all(cfg == others[0] for cfg in others)
    assert seen == {(arm, 0) for arm in ARMS} | {(form, age) for form in FORMS for age in AGES}


def write(folder, table, seed, reward, seconds, line="lr0.0004"):
    columns = {name: [None] * len(reward) for name in KEPT}
    columns |= {"rollout/reward_mean": reward, "time/step": seconds}
    columns |= {"teacher/reverse_kl": [0.25] * len(reward)}
    cell = {"table": table, "line": line, "seed": seed, "outcome": "finished", "eval": {"60": 0.5}}
    path = folder / "cells" / f"{table}-{line}-{seed}.json"
    path.write_text(json.dumps(cell | {"columns": columns}))


def test_the_table_compares_pairs_of_seeds_at_equal_tokens_and_at_equal_seconds(tmp_path):
    (tmp_path / "cells").mkdir()
    rising = [step / 100 for step in range(60)]  # mean of the last third: 0.495
    for seed, more in ((0, 0.0), (1, 0.1), (2, 0.3)):
        write(tmp_path, "rewards", seed, rising, [1.0] * 60)
        higher = [value + more for value in rising]
        write(tmp_path, "token", seed, higher, [2.0] * 60)  # half of the steps: 0.245
        write(tmp_path, "token_2", seed, rising, [1.0] * 60)
    arms, ages = compare.tables(tmp_path).split("\n# ")[1:]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in arms.splitlines()[4:]]
    assert [row[0] for row in rows if row] == ["rewards", "teacher, token form"]
    assert rows[0][1:6] == ["0.0004", "2", "0.495", "0.500", ""]
    # 0.1 and 0.3: half of the interval is 12.71 x 0.1
    assert rows[1][3:7] == ["0.695", "0.500", "+0.200 +- 1.271", ""]
    # 0.345 and 0.545 after 60 seconds
    assert rows[1][7:] == ["2.00", "0.445", "-0.050 +- 1.271"]
    assert rows[0][7:] == ["1.00", "0.495", ""]
    form, older = ages.splitlines()[4:]
    assert older == (
        "| teacher, token form | 2 | 2 | 0.495 | 0.495 to 0.495 | 0.250 | 0 | -0.200 +- 1.271 |"
    )
    assert form.startswith("| teacher, token form | 0 | 2 | 0.695 | 0.595 to 0.795 |")


def test_the_stored_table_is_that_of_the_cells():
    results = EXPERIMENT.folder / "results"
    assert (results / "table.md").read_text() == compare.tables(results)
