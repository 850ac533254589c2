"""examples/paper_long: its settings reach the configuration, and lines differ in what they say they
differ in.
"""

import pytest

from examples.experiments.analyse import Run, hypotheses_table
from examples.experiments.experiment import Cell, load_experiment, merged
from examples.experiments.run import cell_config, result

EXPERIMENT = load_experiment("paper_long")
CELLS = list(EXPERIMENT.cells(list(EXPERIMENT.tables), [3]))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cells_settings_reach_the_configuration(cell):
    cfg = cell_config(cell, ["--rollout.urls", "http://127.0.0.1:1"])
    table = EXPERIMENT.tables[cell.table]
    assert (cfg.run.seed, cfg.model.path.name) == (3, "paper_long-3")
    assert cfg.data.train.parent == cfg.eval.sets["heldout"].parent == cfg.model.path
    assert (
        cfg.run.prompts_per_step == 8 * table.num_mini_batches
        and cfg.run.num_steps == table.num_steps
    )
    assert cfg.rollout.max_response_tokens > 26 * 6 + 4, "the longest right answer must fit"
    for section, keys in table.lines[cell.line].settings.items():
        assert {key: getattr(getattr(cfg, section), key) for key in keys} == dict(keys)


def test_the_score_of_a_cell_is_kept(tmp_path):
    cell = CELLS[0]
    cfg = cell_config(cell, ["--run.dir", str(tmp_path), "--rollout.urls", "http://127.0.0.1:1"])
    cfg.run_dir.mkdir(parents=True)
    (cfg.run_dir / "metrics.jsonl").write_text(
        f'{{"step": 15, "eval/heldout/avg@{cfg.eval.samples}": 0.25}}\n'
    )
    assert result(cell, cfg, "abc", "finished", 1.0)["eval"] == {"15": 0.25}


def test_lines_of_a_table_differ():
    for table in EXPERIMENT.tables.values():
        settings = [repr(merged(line.settings)) for line in table.lines.values()]
        assert len(set(settings)) == len(settings)


def test_every_question_compares_lines_that_exist():
    lines = {line for table in EXPERIMENT.tables.values() for line in table.lines}
    assert {line for _, pairs in EXPERIMENT.questions for pair in pairs for line in pair} <= lines


def test_algorithms_are_compared_with_advantages_of_their_own():
    """H7.

    An algorithm is its loss and its advantage; without replay the reference is the run of H4 and
    H5.
    """
    line = EXPERIMENT.tables["algorithms"].lines
    configs = {name: cell_config(Cell(EXPERIMENT, "algorithms", name, 3), []) for name in line}
    kinds = {name: cfg.advantage_kind for name, cfg in configs.items()}
    centred = {"minirl", "dppo"}
    assert kinds == {name: "mean" if name in centred else "std" for name in line}, kinds
    reference = cell_config(Cell(EXPERIMENT, "n8", "clip", 3), [])
    assert configs["minirl"].advantage_kind == reference.advantage_kind
    settings = [cfg.model_dump() for cfg in (*configs.values(), reference)]
    for config in settings:
        config["run"].pop("name"), config["loss"].pop("name"), config["advantage"].pop("kind")
    assert all(config == settings[0] for config in settings), "they differ in nothing else"


def test_every_hypothesis_of_the_readme_compares_lines_that_exist():
    for name, table, before, after in EXPERIMENT.hypotheses:
        assert {before, after} <= EXPERIMENT.tables[table].lines.keys(), name
    assert {name[:2] for name, *_ in EXPERIMENT.hypotheses} == {
        f"H{number}" for number in range(1, 8)
    }, "H8: lead_times"


def test_a_hypothesis_is_decided_by_pairs_of_one_seed_students_interval_and_fishers_test():
    def runs(scores, outcome="finished"):
        columns = {"rollout/reward_mean": [0.5] * 60}
        return [
            Run(
                {"seed": seed, "outcome": outcome, "eval": {"60": score}, "columns": columns},
                EXPERIMENT.tables["on_policy"],
            )
            for seed, score in scores.items()
        ]

    without = runs({0: 0.4, 1: 0.2}, "diverged")
    lines = {
        ("on_policy", "minirl"): runs({0: 0.5, 1: 0.6, 2: 0.9}),
        ("on_policy", "no_is"): without,
    }
    (row,) = hypotheses_table(EXPERIMENT, lines).splitlines()[2:]
    # differences -0.1 and -0.4: mean -0.25, standard error 0.15, t of one degree of freedom 12.706
    # collapses 2 of 2 and 0 of 2: two of the six ways to deal two collapses to four runs are as
    # uneven
    assert (
        row == "| H1 | on_policy | no_is - minirl | 2 | -0.250 (-2.156 to +1.656) | 2, 0 (0.33) |"
    )


def test_of_equal_keys_the_last_counts():
    parts = {"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": {"z": 4}}
    assert merged(*parts) == {"a": {"x": 1, "y": 3}, "b": {"z": 4}}
