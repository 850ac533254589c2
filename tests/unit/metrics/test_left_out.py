"""The table of what a run leaves out, replaces or repeats: complete, and shown wherever a user
looks.
"""

import ast
import re
from pathlib import Path

import pytest

from megatron_rl.metrics.health import examine_results
from megatron_rl.metrics.left_out import LEFT_OUT, entry_of
from megatron_rl.metrics.left_out_counts import counts_of_run
from megatron_rl.metrics.step_line import step_line
from megatron_rl.metrics.summary import summarize_run
from megatron_rl.records.packed import StepResult
from megatron_rl_viewer.report import health_list, left_out_table
from tests.repo.test_docs import documented, reported

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "megatron_rl/metrics/left_out.py"
FORMER = ROOT / "megatron_rl/config/renamed.py"


def totals_in(source: str) -> set[str]:
    """Every name of a *_total in the code, emitted or not; one with a variable part where it stands
    for no known name.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            name = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
            )
            known = re.compile(re.escape(name).replace(r"\*", r"\w+"))
            if name.startswith("*") or not any(known.fullmatch(entry.metric) for entry in LEFT_OUT):
                names.add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if re.fullmatch(r"[\w*]+/[\w*/]+_total", name)}


def test_every_total_of_the_program_is_in_the_table_and_the_reverse():
    """A new counter needs an entry: its name, its level, a page and advice."""
    emitted = reported()
    known = {name for name in emitted | documented() if name.endswith("_total")}
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        if path not in (TABLE, FORMER):
            known |= totals_in(path.read_text())
    assert len(known) > 40 and {"run/unsaved_batches_total", "track/NAME_failures_total"} <= known
    table = {entry.metric for entry in LEFT_OUT}
    assert known - table == set(), "add them to LEFT_OUT in megatron_rl/metrics/left_out.py"
    assert table - emitted == set(), "nothing emits them"
    assert len(table) == len(LEFT_OUT)


def test_the_reader_sees_totals_in_variables_and_with_variable_parts():
    source = """
NAME = "new/thing_total"
sums.add_total(f"{group}/{name}_total", 1)
sums.add_total(f"rollout/{name}_unheard_of_total", 1)
sums.add_total(f"rollout/faults_{name}_total", 1)
"""
    assert totals_in(source) == {"new/thing_total", "*/*_total", "rollout/*_unheard_of_total"}


def test_the_levels_are_those_of_the_documents():
    page = (
        (ROOT / "docs/reference/metrics.md")
        .read_text()
        .partition("## Left out, replaced or repeated")[2]
        .partition("All other counts")[0]
    )
    lists = [set(re.findall(r"`([^`]+)`", text)) for text in page.split("- **")[1:]]
    assert lists == [
        {entry.metric for entry in LEFT_OUT if entry.level == level} for level in ("bad", "watch")
    ]


def test_what_is_worth_a_look_says_what_it_means_and_what_to_do():
    for entry in LEFT_OUT:
        assert bool(entry.text and entry.advice) is entry.is_alarm, entry.metric
        assert entry.of == "" or entry_of(entry.of).level == "base", entry.metric


def test_a_metric_of_a_users_function_is_no_entry_of_the_table():
    """It may have any name, also that of an entry; so may an evaluation set."""
    for name in ("eval/h/reward/failed_frac", "eval/a/h/episode/failed_frac"):
        assert entry_of(name) is None
        assert counts_of_run([StepResult(0, 1, {name: 0.5})]) == []
    for name in ("h", "a/h", "reward"):
        assert entry_of(f"eval/{name}/failed_frac").label.endswith(
            f" of {name} with failed rewards"
        )


@pytest.mark.parametrize("entry", LEFT_OUT, ids=lambda entry: entry.metric)
def test_what_one_step_counts_is_in_its_line_the_summary_health_and_the_report(entry, tmp_path):
    """Step 2 of 3 counts 3; a total since the start stays at 3, the others are 0 again in step
    3.
    """
    name = entry.metric.replace("NAME", "some")
    later = 3.0 if entry.per == "run" else 0.0
    results = [
        StepResult(step, step, {name: value}) for step, value in enumerate((0.0, 3.0, later))
    ]
    found, label = entry_of(name), entry.label.replace("NAME", "some")
    amount = 1 if entry.per == "steps" else 3
    is_shown = entry.level != "base"

    lines = [
        step_line(result, 3, results[max(0, step - 1)].metrics)
        for step, result in enumerate(results)
    ]
    text = entry.line.format(percent=300.0) or f"{label} {amount}"
    assert [text in line for line in lines] == [False, entry.is_alarm, False]

    summary = summarize_run(results, tmp_path, (), None)
    assert (f"{label} " in summary.text.partition("health")[0]) is is_shown
    assert summary.values["counts"] == ({label: amount} if is_shown else {})
    assert ("nothing skipped or left out" in summary.text) is not is_shown

    findings = [each for each in examine_results(results) if each.metric == name]
    assert [each.since_step for each in findings] == ([2] if entry.is_alarm else [])
    assert all(each.level in ("watch", "bad") and each.guide == found.guide for each in findings)

    page = left_out_table(results)
    assert (f"<code>{name}</code>" in page and f'number">{amount}<' in page) is is_shown
    assert (f"<code>{name}</code>" in health_list(results, {})) is entry.is_alarm


def test_counts_of_a_run_are_the_last_total_or_the_sum_over_steps():
    """Also where a metric is absent from some steps, or NaN."""
    rows = [
        {
            "rollout/retries_total": 1.0,
            "replay/missing_rows_total": 2.0,
            "optim/skipped_updates": 0.5,
        },
        {"replay/missing_rows_total": 3.0, "optim/skipped_updates": float("nan")},
        {"rollout/retries_total": 4.0, "optim/skipped_updates": 0.25, "rollout/reward_mean": 1.0},
        {"rollout/retries_total": float("nan")},
    ]
    counts = counts_of_run([StepResult(step, 0, metrics) for step, metrics in enumerate(rows)])
    assert {count.entry.metric: count.amount for count in counts} == {
        "rollout/retries_total": 4.0, "replay/missing_rows_total": 5.0,
        "optim/skipped_updates": 2.0,
    }  # fmt: skip


def test_names_of_trackers_are_shown_as_they_are():
    page = left_out_table([StepResult(0, 1, {"track/<b>_failures_total": 1.0})])
    assert "<b>" not in page and "failures of &lt;b&gt;" in page
