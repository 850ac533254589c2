"""examples/experiments/lead_times.py: alarms, leads and the choice of a rule; what is committed is what the cells give."""

import re
from pathlib import Path

import numpy as np
import pytest

from examples.experiments import analyse, lead_times
from examples.experiments.experiment import EXAMPLES, load_experiment
from examples.experiments.lead_times import METRICS, Curves, Metric, Rule, Score, best, held_out, score
from examples.experiments.run import KEPT

UP, DOWN = Metric("up", ("a",)), Metric("down", ("a",), "below")
RESULTS = EXAMPLES / "paper_tiny/results"


def alarm(values, bound, *, metric=UP, is_factor=False, first=2, consecutive=1):
    return Rule(metric, bound, is_factor, first, consecutive).alarm(np.array(values, float))


def test_an_alarm_is_the_first_step_beyond_the_bound_after_the_first_steps():
    assert alarm([9, 9, 1, 5, 6], 4) == 4, "the first two steps give none"
    assert alarm([9, 9, 1, 4, 4], 4) is None, "at the bound it is inside"
    assert alarm([0, 0, 5, 3, 9], 4, metric=DOWN) == 4
    assert alarm([9, 9], 4) is None and alarm([], 4) is None


def test_a_factor_is_of_the_runs_own_median():
    assert alarm([1, 3, 2, 3.9, 4.1], 2, is_factor=True) == 5
    assert alarm([1, 100, 3, 5, 6.1], 2, is_factor=True, first=3) == 5, "the median of 1, 100 and 3"
    assert alarm([4, 4, 3, 1.9], 0.5, metric=DOWN, is_factor=True) == 4


def test_steps_in_a_row_give_the_alarm_at_the_last_of_them():
    assert alarm([0, 0, 5, 0, 5, 5], 4, consecutive=2) == 6
    assert alarm([0, 5, 5, 0], 4, consecutive=2) is None, "the first steps do not count"
    assert alarm([0, 0, 5, np.nan, 5, 0], 4, consecutive=2) is None


def run(seed, values, collapse=None):
    return Curves("n8", seed, collapse, {metric: np.array(values, float) for metric in (UP, DOWN, *METRICS)})


def test_leads_are_steps_before_the_collapse_and_alarms_of_other_runs_are_false():
    rule = Rule(UP, 4, False, 2, 1)
    runs = [
        run(0, [0, 0, 0, 9, 9, 9, 9], 7),
        run(0, [0, 0, 0, 9, 9], 4),  # with the collapse: not before it
        run(0, [0, 0, 0], 3),
        run(0, [0, 0, 9]),
        run(0, [0, 0, 0]),
    ]
    found = score(rule, runs)
    assert (found.leads, found.collapses, found.false_alarms, found.others) == ([3], 3, 1, 2)
    assert found.cells() == "1/3 | 3 (3 to 3) | 1/2"
    missing = Curves("n8", 0, 5, {UP: np.full(9, np.nan)})
    assert score(rule, [missing]) == Score(), "a run that did not store it says nothing"


def test_the_criterion_puts_false_alarms_first_then_detections_then_leads():
    scores = [
        Score([9] * 9, 10, 2, 10),  # 20 % false
        Score([1], 10, 0, 10),
        Score([1, 1], 10, 1, 10),
        Score([2, 2], 10, 1, 10),
        Score([2, 2], 10, 0, 10),
    ]
    assert sorted(scores, key=lambda found: found.order) == scores


def test_the_best_rule_finds_a_clear_metric_and_none_is_chosen_where_nothing_tells():
    falls = [run(seed, [1, 1, 1, 8, 8, 8], 6) for seed in (0, 1, 2)]
    stays = [run(seed, [1, 1, 1, 1, 1, 1]) for seed in (0, 1, 2)]
    rule = best([UP], [*falls, *stays])
    assert rule is not None and score(rule, [*falls, *stays]).leads == [2, 2, 2]
    assert best([UP], [run(0, [1, 1, 1, 8], 4), run(0, [1, 1, 1, 8])]) is None
    assert best([UP], []) is None


def test_a_seed_is_tried_with_the_rule_of_the_others():
    """Seed 2 collapses without a sign: what the others taught is a false alarm on its stable run."""
    runs = [run(seed, [1, 1, 1, 8, 8, 8], 6) for seed in (0, 1)] + [run(seed, [1] * 6) for seed in (0, 1)]
    runs += [run(2, [1] * 6, 6), run(2, [1, 1, 1, 8, 8, 8])]
    found = held_out([UP], runs)
    assert (sorted(found.leads), found.collapses, found.false_alarms, found.others) == ([], 3, 1, 3)
    assert not lead_times.is_justified(found) and lead_times.is_justified(Score([1], 2, 1, 10))
    assert held_out([UP], runs[:4]).leads == [2, 2]


def test_a_metric_that_no_cell_stored_is_named():
    text = lead_times.report("x", [Curves("n8", 0, None, {metric: np.full(9, np.nan) for metric in METRICS})])
    assert text.count("| not stored |") == len(METRICS) + 1 and "not justified" in text


def test_every_column_is_a_metric_that_cells_keep():
    documented = set(re.findall(r"^\| `([^`]+)` \|", (EXAMPLES.parent / "docs/reference/metrics.md").read_text(), re.M))
    kept = {name for name in KEPT if not name.startswith("eval/")}
    assert kept <= documented
    assert {column for metric in METRICS for column in metric.columns} <= kept


def committed(name: str) -> str:
    return (RESULTS / name).read_text()


@pytest.fixture(scope="module")
def lines():
    return analyse.load(RESULTS / "cells", load_experiment("paper_tiny"))


def test_the_committed_tables_are_those_of_the_committed_cells(lines):
    experiment, text = load_experiment("paper_tiny"), committed("tables.md")
    for name, table in experiment.tables.items():
        present = {line: lines[name, line] for line in table.lines if lines[name, line]}
        assert not present or analyse.stability_table(present) in text
    assert analyse.effects_table(experiment, lines) in text


def test_the_committed_lead_times_are_those_of_the_committed_cells(lines):
    runs = [Curves.of(run) for every in lines.values() for run in every]
    assert lead_times.report("paper_tiny", runs) == committed("lead_times.md")


def test_the_results_in_the_repository_stay_small():
    sizes = [path.stat().st_size for path in Path(EXAMPLES).glob("*/results/**/*") if path.is_file()]
    assert sizes and sum(sizes) < 20e6
