"""examples/experiments/lead_times.py: alarms, leads and the choice of a rule; what is committed is
what the cells give.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from examples.experiments import analyse, lead_times
from examples.experiments.experiment import ANALYSED, EXAMPLES, load_experiment
from examples.experiments.lead_times import (
    METRICS,
    Curves,
    Metric,
    Rule,
    Score,
    best,
    held_out,
    score,
)
from examples.experiments.run import KEPT

UP, DOWN = Metric("up", ("a",)), Metric("down", ("a",), "below")


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
    metrics = (UP, DOWN, *METRICS)
    return Curves(
        "n8",
        seed,
        collapse,
        {metric: np.array(values, float) for metric in metrics},
        frozenset(metrics),
    )


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
    missing = Curves("n8", 0, 5, {UP: np.full(9, np.nan)}, frozenset())
    assert score(rule, [missing]) == Score(), "a run that did not store it says nothing"


def test_runs_in_which_a_rule_cannot_fire_are_no_evidence_for_it():
    """Staleness is exactly 0 on policy: with these runs in the denominator three false alarms of 16
    would be 8 %.
    """
    rule, still = (
        Rule(UP, 1.25, True, 2, 1),
        Curves("on_policy", 0, None, {UP: np.zeros(5)}, frozenset()),
    )
    runs = [run(seed, [1, 1, 9] if seed < 3 else [1, 1, 1]) for seed in range(16)] + [still] * 23
    assert (score(rule, runs).false_alarms, score(rule, runs).others) == (3, 16)
    fallen = Curves("on_policy", 0, 4, {UP: np.zeros(5)}, frozenset())
    assert score(rule, [fallen]).collapses == 1, "a collapse that the rule cannot see is missed"
    assert held_out([UP], [still, run(1, [1, 1, 1])]).others == 0, "no rule, no evidence"


def test_what_moves_in_a_line_follows_from_its_configuration(lines):
    """On policy r is exactly 1, and without a clip no token is clipped."""
    ratio, clipped = (
        metric for metric in METRICS if metric.label in ("largest r", "clipped tokens")
    )
    for (table, name), runs in lines.items():
        for of_run in lead_times.curves_of([runs]):
            is_off_policy = runs[0].table.num_mini_batches > 1
            assert (ratio in of_run.moving) == is_off_policy
            assert (clipped in of_run.moving) == (is_off_policy and "no_clip" not in name), (
                table,
                name,
            )


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
    """Seed 2 collapses without a sign: what the others taught is a false alarm on its stable
    run.
    """
    runs = [run(seed, [1, 1, 1, 8, 8, 8], 6) for seed in (0, 1)] + [
        run(seed, [1] * 6) for seed in (0, 1)
    ]
    runs += [run(2, [1] * 6, 6), run(2, [1, 1, 1, 8, 8, 8])]
    found = held_out([UP], runs)
    assert (sorted(found.leads), found.collapses, found.false_alarms, found.others) == ([], 3, 1, 1)
    assert not lead_times.is_justified(found) and lead_times.is_justified(Score([1], 2, 1, 10))
    assert held_out([UP], runs[:4]).leads == [2, 2]


def test_a_metric_that_no_cell_stored_is_named():
    stored = {metric: np.full(9, np.nan) for metric in METRICS}
    text = lead_times.report("x", [Curves("n8", 0, None, stored, frozenset())])
    assert text.count("| not stored |") == len(METRICS) + 1 and "not justified" in text


def test_every_column_is_a_metric_that_cells_keep():
    page = (EXAMPLES.parent / "docs/reference/metrics.md").read_text()
    items = re.findall(r"^- ((?:`[^`]+`(?:,\s+)?)+):", page, re.M)
    documented = set(re.findall("`([^`]+)`", " ".join(items)))
    kept = {name for name in KEPT if not name.startswith("eval/")}
    assert kept <= documented
    assert {column for metric in METRICS for column in metric.columns} <= kept


@pytest.fixture(scope="module")
def lines():
    return analyse.load(EXAMPLES / "paper_tiny/results/cells", load_experiment("paper_tiny"))


@pytest.mark.parametrize("name", ANALYSED)
def test_the_committed_tables_are_those_of_the_committed_cells(name, tmp_path, monkeypatch):
    """What `make figures` writes, all but the pictures."""
    (tmp_path / "cells").symlink_to(EXAMPLES / name / "results/cells")
    monkeypatch.setattr(analyse, "plot", lambda *arguments: None)
    monkeypatch.setattr("sys.argv", ["figures", name, "--results", str(tmp_path)])
    for module, document in ((analyse, "tables.md"), (lead_times, "lead_times.md")):
        module.main()
        assert (tmp_path / document).read_text() == (
            EXAMPLES / name / "results" / document
        ).read_text()


def test_documents_quote_what_the_cells_give():
    """The table of the best rules in results/lead_times.md, and the differences that decide the
    hypotheses of paper_long.
    """
    guide = (EXAMPLES.parent / "results/lead_times.md").read_text()
    quoted = [line.strip("| ").split(" | ") for line in guide.splitlines() if line.startswith("|")]
    for column, name in enumerate(ANALYSED, 1):
        text = (EXAMPLES / name / "results/lead_times.md").read_text().replace("/", " of ")
        row = re.search(
            r"^\| \*\*all of them\*\* \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| .+? \|"
            r" (.+?) \|$",
            text,
            re.M,
        )
        _, detected, lead, false, outside, outside_false = row.groups()
        alone = re.search(r"alone: .+? and (\d+ of \d+)", text)[1]
        cells = {words[0]: words[column] for words in quoted if len(words) == 3}
        assert [cells[key] for key in (
            "detected", "lead, median (range)", "false alarms", "held out",
            "held out, false alarms",
            "the same, only tables with a collapse",
        )] == [detected, lead, false, outside, outside_false, alone]  # fmt: skip
    tables, readme = (
        (EXAMPLES / "paper_long" / page).read_text() for page in ("results/tables.md", "README.md")
    )
    differences = re.findall(r"^\| H.+ \| (\S+ \(\S+ to \S+\)) \|", tables, re.M)
    assert len(differences) > 9 and not [text for text in differences if text not in readme]


def test_the_results_in_the_repository_stay_small():
    sizes = [
        path.stat().st_size for path in Path(EXAMPLES).glob("*/results/**/*") if path.is_file()
    ]
    assert sizes and sum(sizes) < 20e6
