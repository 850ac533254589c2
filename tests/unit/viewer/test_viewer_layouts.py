"""Runs of both layouts look the same, and a step that is written again replaces the first."""

import json
import os
from contextlib import closing

import pytest

from megatron_rl_viewer import expert_loads, token_data
from megatron_rl_viewer.query import Query, groups_page, rollouts_page
from megatron_rl_viewer.run_folder import Run
from tests.former_layout import to_present_layout
from tests.viewer_run import add_step, make_rollout, write_run

STEPS = 3


def shown(run):
    """What pages show of a run, without names of files."""
    with closing(run.index.connect()) as connection:
        tables = [
            page(connection, Query(limit=1000, sort="step", order="asc"))
            for page in (rollouts_page, groups_page)
        ]
    keys = [row["key"] for row in tables[0]["rows"]]
    responses = [token_data.rollout(run, key) for key in keys]
    for response in responses:
        response["meta"]["trained"].pop("tensors")
    by_key = {row["key"]: row for table in tables for row in table["rows"]}
    return by_key, responses, expert_loads.loads_of_steps(run, ":")


@pytest.fixture
def opened(tmp_path):
    def read(folder):
        run = Run(folder, tmp_path / "cache")
        run.update()
        assert run.warnings() == []
        return run

    return read


@pytest.mark.parametrize("replicas", [1, 2])
def test_both_layouts_look_the_same(tmp_path, opened, replicas):
    folder = write_run(tmp_path / "run", steps=STEPS, replicas=replicas)
    former = shown(opened(folder))
    present = opened(to_present_layout(folder))
    found = shown(present)
    assert found[0] == former[0] and len(found[0]) > 16 * STEPS
    assert all(row["has_tensors"] for row in found[0].values() if "has_tensors" in row)
    for one, other in zip(found[1], former[1], strict=True):
        assert one == other and one["tokens"] and not one["missing"]
    assert json.dumps(found[2], default=repr) == json.dumps(former[2], default=repr)


def test_a_run_that_was_resumed_after_an_update_has_both(tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=2)
    later = to_present_layout(write_run(tmp_path / "later", steps=STEPS))
    for half in ("rollouts", "trained"):
        (folder / half).mkdir()
        for path in (later / half).glob("step_000003*"):
            path.rename(folder / half / path.name)
    rows, responses, _ = shown(opened(folder))
    assert {row["step"] for row in rows.values()} == {1, 2, 3}
    assert all(response["tokens"] and not response["missing"] for response in responses)


def test_a_step_that_is_written_again_replaces_its_rows_alone(tmp_path, opened):
    folder = to_present_layout(write_run(tmp_path / "run", steps=STEPS))
    run = opened(folder)
    before = shown(run)[0]
    path = folder / "rollouts/step_000002.jsonl"
    line = make_rollout(2, "Q9/0", "trained", "rollouts")[0] | {"response": "zebra"}
    (folder / "rollouts/new").write_text(json.dumps(line) + "\n")
    os.replace(folder / "rollouts/new", path)
    for half in ("rollouts", "trained"):  # a resumed run removes what it trains again
        for kind in ("jsonl", "safetensors"):
            (folder / half / f"step_000003.{kind}").unlink()
    (folder / "trained/step_000002.jsonl").unlink()
    run.update()
    with closing(run.index.connect()) as connection:
        rows = rollouts_page(connection, Query(limit=1000))["rows"]
        found = rollouts_page(connection, Query(limit=1000, text="zebra"))["rows"]
        groups = groups_page(connection, Query(limit=1000))["rows"]
    assert [row["id"] for row in found] == ["Q9/0"] and found[0]["kl"] is None
    assert [row for row in rows if row["step"] == 1] == [
        row for row in before.values() if row["step"] == 1 and "response" in row
    ][::-1]
    assert {(row["step"], row["id"]) for row in rows if row["step"] != 1} == {(2, "Q9/0")}
    assert sorted(row["step"] for row in groups) == [1, 1, 1, 1, 2]
    assert run.index.revision == 1 and run.warnings() == []
    add_step(folder, 3)  # in the former layout, which is of the same run
    run.update()
    with closing(run.index.connect()) as connection:
        assert rollouts_page(connection, Query(limit=1))["total"] == 16 + 1 + 16


def test_another_attempt_with_answers_of_equal_length_replaces_the_first(tmp_path, opened):
    folder = to_present_layout(write_run(tmp_path / "run", steps=1))
    path = folder / "rollouts/step_000001.jsonl"
    lines = [make_rollout(1, f"Q1/{k}", "trained", "rollouts")[0] for k in range(2)]

    def attempt(response):
        rows = [lines[0] | {"response": response}, lines[1]]
        (folder / "new").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(folder / "new", path)

    attempt("13")
    run = opened(folder)
    attempt("12")
    run.update()
    with closing(run.index.connect()) as connection:
        rows = rollouts_page(connection, Query(limit=9, sort="id", order="asc"))["rows"]
    assert [row["response"] for row in rows][:1] == ["12"] and len(rows) == 2


def test_links_that_leave_the_run_are_not_followed(tmp_path, opened):
    folder = to_present_layout(write_run(tmp_path / "run", steps=1))
    other = to_present_layout(write_run(tmp_path / "other", steps=STEPS))
    for kind in ("jsonl", "safetensors"):
        name = f"rollouts/step_000002.{kind}"
        (folder / name).symlink_to(other / name)
    rows = shown(opened(folder))[0]
    assert {row["step"] for row in rows.values()} == {1}
    linked = to_present_layout(write_run(tmp_path / "linked", steps=1))
    for path in (linked / "rollouts").iterdir():
        path.unlink()
    (linked / "rollouts").rmdir()
    (linked / "rollouts").symlink_to(other / "rollouts")
    run = opened(linked)
    with closing(run.index.connect()) as connection:
        assert rollouts_page(connection, Query())["total"] == 0
