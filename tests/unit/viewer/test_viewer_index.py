"""The index of a run: a resumed run, cut lines, rewritten files, damaged tensors, other schemas;
and what is said of each.
"""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_rl_viewer import index as index_module
from megatron_rl_viewer import query as query_module
from megatron_rl_viewer import token_data
from megatron_rl_viewer.answer import answer_json
from megatron_rl_viewer.expert_loads import chosen_steps
from megatron_rl_viewer.follow import FilePlace, batch_of, new_lines
from megatron_rl_viewer.query import Query, groups_page, rollouts_page
from megatron_rl_viewer.run_folder import NoRunError, Run, Runs
from megatron_rl_viewer.tensor_files import ShardError, TensorFile
from megatron_rl_viewer.view_command import main
from tests.viewer_run import GROUP, PROMPTS, add_metrics, add_step, append, make_rollout, write_run

STEP = PROMPTS * GROUP


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "run", steps=3, tokenizer=False)


@pytest.fixture
def opened(run_dir, tmp_path):
    """A function that opens the run as a new process would, reads it, and returns it."""

    def again():
        run = Run(run_dir, tmp_path / "cache")
        run.update()
        return run

    return again


def table(run, page=rollouts_page, **query):
    with closing(run.index.connect()) as connection:
        return page(connection, Query(limit=1000, **query))


def test_new_lines_are_added_by_the_process_that_opens_it_next(run_dir, opened):
    assert table(opened())["total"] == 3 * STEP
    add_step(run_dir, 4)
    run = opened()
    assert table(run)["total"] == 4 * STEP and run.index.revision == 0
    assert table(run, groups_page)["total"] == 4 * PROMPTS
    found = table(run, sort="step")["rows"]
    assert all(row["has_tensors"] and row["kl"] is not None for row in found)


@pytest.mark.parametrize("column", ["reward", "advantage"])
def test_a_filter_keeps_a_recorded_number_that_equals_its_value(run_dir, opened, column):
    """Rewards and advantages are float32: 0.7 is recorded as 0.699999988."""
    line = make_rollout(4, "Q0/0", "trained", "rollouts")[0] | {column: float(np.float32(0.7))}
    append(run_dir / "rollouts.jsonl", [line])
    run = opened()
    for operator, total in ((">=", 1), ("=", 1), ("<=", 1), ("<", 0), (">", 0), ("!=", 0)):
        at_value = {"column": column, "op": operator, "value": 0.7}
        rows = table(run, filters=[{"column": "step", "op": "=", "value": 4}, at_value])
        assert rows["total"] == total, operator


def test_a_step_that_is_written_again_replaces_the_first(run_dir, opened):
    """A run that died after step 3 and resumed at 2 draws other prompts: what it had written of 2
    and 3 is of the past.
    """
    run = opened()
    (run_dir / "rollouts_000003.safetensors").unlink()
    line = make_rollout(2, "Q9/0", "trained", "rollouts")[0] | {"response": "zebra"}
    append(run_dir / "rollouts.jsonl", [line, line | {"step": 3, "id": "Q8/0"}])
    add_step(run_dir, 4)
    run.update()
    found = table(run)
    ids = {
        step: {row["id"] for row in found["rows"] if row["step"] == step} for step in (1, 2, 3, 4)
    }
    assert ids[2] == {"Q9/0"} and ids[3] == {"Q8/0"} and ids[1] == ids[4]
    assert found["total"] == 2 * STEP + 2 and run.index.revision == 2
    assert all(row["has_tensors"] for row in found["rows"] if row["step"] in (1, 4))
    assert (
        table(run, text="zebra")["total"] == 2
        and table(run, groups_page)["total"] == 2 * PROMPTS + 2
    )
    assert table(opened())["rows"] == found["rows"]


@pytest.mark.parametrize("live", [True, False])
def test_a_run_that_was_killed_in_its_last_step_writes_that_step_again(run_dir, opened, live):
    """Resumed at 2, it samples step 3 again: two other groups, then some of the same.

    No step is between the attempts.
    """
    run = opened() if live else None
    names = [f"Q{prompt}/{k}" for prompt in (8, 9, 2, 0) for k in range(GROUP)]
    lines = [
        make_rollout(3, name, "trained", "rollouts")[0] | {"response": "zebra"} for name in names
    ]
    append(run_dir / "rollouts.jsonl", lines)
    run = run or opened()
    run.update()
    found = [row for row in table(run)["rows"] if row["step"] == 3]
    assert {row["id"] for row in found} == set(names) and all(
        row["response"] == "zebra" for row in found
    )
    assert table(run)["total"] == 3 * STEP and table(run, groups_page)["total"] == 3 * PROMPTS
    assert run.index.revision == 1
    if live:
        assert all(row["kl"] is None for row in found), (
            "the trainer's half of the abandoned attempt"
        )
        rollout = token_data.rollout(run, "3/rollouts/Q0%2F0")
        assert rollout["meta"]["trained"] is None
    append(run_dir / "rollouts.jsonl", lines[4:] + lines[:4])  # and once more
    run.update()
    assert [row["id"] for row in table(run, order="asc")["rows"] if row["step"] == 3] == names[
        4:
    ] + names[:4]


def test_a_sequence_before_the_first_id_that_is_repeated_stays(run_dir, opened):
    """The first episode of the next attempt has two sequences, that of the abandoned one had
    one.
    """
    line = make_rollout(3, "Q0/0", "trained", "rollouts")[0]
    append(run_dir / "rollouts.jsonl", [line | {"id": "Q0/0/0", "episode": "Q0/0"}, line])
    assert [row["id"] for row in table(opened(), order="asc")["rows"] if row["step"] == 3] == [
        "Q0/0/0",
        "Q0/0",
    ]


def test_an_attempt_that_was_cut_is_replaced_too(run_dir, opened):
    path = run_dir / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-5], *lines[2 * STEP :]]))
    found = [row["id"] for row in table(opened(), order="asc")["rows"] if row["step"] == 3]
    assert found == [json.loads(line)["id"] for line in lines[2 * STEP :]]


def test_a_cut_last_line_is_named_and_read_when_it_is_complete(run_dir, opened):
    path = run_dir / "rollouts.jsonl"
    text = path.read_text()
    path.write_text(text[:-30])
    run = opened()
    assert table(run)["total"] == 3 * STEP - 1
    assert run.warnings() == [f"rollouts.jsonl:{3 * STEP}: cut line"]
    path.write_text(text)
    run.update()
    assert table(run)["total"] == 3 * STEP and run.warnings() == []


def test_lines_that_are_no_rollouts_are_named_and_the_others_shown(run_dir, opened):
    with open(run_dir / "rollouts.jsonl", "a") as file:
        file.write(
            '{"step": 3, "id": "Q7/0"}\nnot JSON\n[]\n{"step": "3", "id": "a", "prompt": "",'
            ' "response": ""}\n'
        )
    with open(run_dir / "trained.jsonl", "a") as file:
        file.write('{"schema": 2, "step": 3, "id": "Q0/0"}\n')
    append(run_dir / "events.jsonl", [{"kind": "start"}])
    append(run_dir / "metrics.jsonl", [{"policy_version": 1}])
    run = opened()
    warnings = "\n".join(run.warnings())
    assert table(run)["total"] == 3 * STEP and len(run.warnings()) == 7
    for text in (
        f"rollouts.jsonl:{3 * STEP + 1}: not a rollout: no 'response_length'",
        f"rollouts.jsonl:{3 * STEP + 2}: not a rollout: ",
        f"trained.jsonl:{3 * STEP + 1}: not a line of the trainer's half: schema = 2: must be 1",
        "events.jsonl:5: not an event",
        "metrics.jsonl:4: not a step's metrics",
    ):  # fmt: skip
        assert text in warnings


def test_many_bad_lines_are_not_all_named(run_dir, opened):
    with open(run_dir / "rollouts.jsonl", "a") as file:
        file.write("x\n" * 500)
    warnings = opened().warnings()
    assert (
        len(warnings) == index_module.MAX_WARNINGS and "further lines are not named" in warnings[-1]
    )


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_rewritten_file_is_read_from_its_beginning(run_dir, opened, shrinks):
    run = opened()
    path = run_dir / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(lines[:STEP]) if shrinks else "".join(lines).replace('"id": "Q3', '"id": "R3') * 2
    )
    run.update()
    assert table(run)["total"] == (STEP if shrinks else 3 * STEP) and run.index.revision >= 1
    assert any(row["id"].startswith("R3") for row in table(run)["rows"]) is not shrinks
    path.unlink()
    run.update()
    assert table(run)["total"] == 0


def test_an_index_of_another_version_or_a_damaged_one_is_built_again(run_dir, opened, monkeypatch):
    run = opened()
    inode = os.stat(run.index.path).st_ino
    assert os.stat(opened().index.path).st_ino == inode
    schema = index_module.SCHEMA.replace(f"= {index_module.VERSION};", "= 999;")
    monkeypatch.setattr(index_module, "VERSION", 999)
    monkeypatch.setattr(index_module, "SCHEMA", schema)
    assert table(opened())["total"] == 3 * STEP
    with closing(sqlite3.connect(run.index.path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (999,)
    run.index.path.write_bytes(b"no database" * 1000)
    assert table(opened())["total"] == 3 * STEP


def test_an_index_that_is_locked_is_not_deleted(run_dir, opened, monkeypatch):
    """Another viewer holds it: that is an error, not damage."""
    path = opened().index.path
    content, connect = path.read_bytes(), sqlite3.connect
    with closing(connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(
            sqlite3, "connect", lambda *args, **more: connect(*args, **more | {"timeout": 0.1})
        )
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            opened()
        other.execute("ROLLBACK")
    assert path.stat().st_size == len(content) and os.listdir(path.parent) == [path.name]


def test_a_version_that_no_table_holds_is_named(run_dir, opened):
    line = make_rollout(4, "Q0/0", "trained", "rollouts")[0]
    append(
        run_dir / "rollouts.jsonl",
        [line | {"policy_versions": [[2**70, 3]]}, line | {"id": "Q0/1"}],
    )
    run = opened()
    assert [row["id"] for row in table(run)["rows"] if row["step"] == 4] == ["Q0/1"]
    assert any("policy_versions" in text and "64 bits" in text for text in run.warnings())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_is_not_followed_any_more_says_so(run_dir, tmp_path, monkeypatch):
    runs = Runs([run_dir], tmp_path / "cache")
    monkeypatch.setattr(runs.runs[0].metrics, "update", lambda: 1 / 0)
    runs.start()
    runs.stop()
    assert "not followed any more: ZeroDivisionError" in runs.runs[0].problem


def test_replicas_and_the_trainers_half_of_another_replica(tmp_path):
    """Ids are unique within a file only: `sampled_by` says of which file a trained line is."""
    folder = write_run(tmp_path / "two", steps=1, tokenizer=False, replicas=2)
    first = make_rollout(1, "Q0/0", "trained", "rollouts")[0]
    append(folder / "rollouts.dp1.jsonl", [first])  # the id of a rollout of the other file
    for name, by in (("trained.jsonl", "rollouts.dp1.jsonl"), ("trained.dp1.jsonl", "rollouts")):
        append(
            folder / name,
            [
                {
                    "schema": 1,
                    "step": 1,
                    "id": "Q0/0",
                    "sampled_by": by,
                    "tensors": None,
                    "kl": 7.0 + len(by),
                }
            ],
        )
    run = Run(folder, tmp_path / "cache")
    run.update()
    found = {row["key"]: row["kl"] for row in table(run)["rows"] if row["id"] == "Q0/0"}
    assert found == {"1/rollouts/Q0%2F0": 15.0, "1/rollouts.dp1/Q0%2F0": 25.0}


def test_an_episode_of_several_sequences_is_one_response_of_its_group(run_dir, opened):
    last = make_rollout(4, "Q0/0", "trained", "rollouts")[0] | {"reward": 1.0}
    earlier = last | {"id": "Q0/0/0", "episode": "Q0/0", "response_length": 100}
    other = last | {"id": "Q0/1", "reward": 0.0, "response_length": 30}
    append(run_dir / "rollouts.jsonl", [earlier, last | {"response_length": 20}, other])
    (group,) = [row for row in table(opened(), groups_page)["rows"] if row["step"] == 4]
    assert group["count"] == 2 and group["key"] == "4/rollouts/Q0"
    # means of responses, with all sequences of an episode, as in rollout/response_length_mean
    assert group["reward_mean"] == 0.5 and group["length_mean"] == 75.0


ODD = [
    None,
    True,
    -1,
    10**30,
    -(10**400),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "a\ud800",
    [],
    [[]],
    [[1]],
    {},
    {"a": 1},
]


def test_any_value_of_any_field_is_shown_or_named(run_dir, opened):
    """Each field of each file with each odd value: every line is a row or a warning, and later
    lines are read.
    """
    line, _, trained, _ = make_rollout(4, "Q0/0", "trained", "rollouts")
    for name, fields in (("rollouts.jsonl", line), ("trained.jsonl", trained)):
        rows = [
            {**fields, "id": f"Q0/{n}", key: odd}
            for n, (key, odd) in enumerate((k, o) for k in fields for o in ODD)
        ]
        with open(run_dir / name, "a") as file:
            file.write(
                "".join(
                    json.dumps(row) + "\n" for row in [*rows, fields | {"step": 7, "id": "last/0"}]
                )
            )
            file.write("[" * 100_000 + "\n")
    with open(run_dir / "metrics.jsonl", "a") as file:
        for odd in ODD:
            file.write(json.dumps({"step": 4, "policy_version": 4, "train/entropy": odd}) + "\n")
            file.write(json.dumps({"step": odd, "policy_version": 4, "train/entropy": 1.0}) + "\n")
            file.write(json.dumps({"step": 4, "policy_version": 4, "per_layer": odd}) + "\n")
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(
            "".join(json.dumps({"step": odd, "kind": odd, "text": odd}) + "\n" for odd in ODD)
        )
    run = opened()
    (last,) = [row for row in table(run)["rows"] if row["step"] == 7]
    assert (
        last["id"] == "last/0" and last["kl"] is not None and run.warnings() and run.problem is None
    )
    for row in table(run)["rows"]:
        answer_json(token_data.rollout(run, row["key"]))
    answer_json([run.summary(0), run.metrics.table(), run.health(), run.events.since(0)])


def test_numbers_that_are_not_finite_and_texts_that_are_no_unicode(run_dir, opened):
    line = make_rollout(4, "Q0/0", "trained", "rollouts")[0]
    odd = json.dumps(
        line
        | {
            "reward": float("nan"),
            "prompt": [{"role": "user", "content": "hello"}],
            "response": "a\ud800b",
        }
    )
    with open(run_dir / "rollouts.jsonl", "a") as file:
        file.write(odd + "\n")
    (row,) = [row for row in table(opened())["rows"] if row["step"] == 4]
    assert row["reward"] is None and "hello" in row["prompt"] and row["response"] == "a?b"


def test_a_batch_ends_at_its_bytes_and_every_line_is_read(run_dir, opened, monkeypatch):
    lines = list(new_lines(run_dir / "rollouts.jsonl", FilePlace()))
    size = len(lines[0].data) + len(lines[1].data)
    assert (
        batch_of(iter(lines), 5000, size) == lines[:2]
        and batch_of(iter(lines), 5, 2**30) == lines[:5]
    )
    batches = []
    monkeypatch.setattr(index_module, "BATCH_BYTES", 1000)
    monkeypatch.setattr(
        index_module, "batch_of", lambda *args: batches.append(batch_of(*args)) or batches[-1]
    )
    run = opened()
    assert (
        table(run)["total"] == 3 * STEP and run.index.revision == 0 and max(map(len, batches)) < 5
    )


def test_copies_of_the_files_are_not_read(run_dir, opened):
    for stem in ("rollouts", "trained"):
        text = (run_dir / f"{stem}.jsonl").read_text()
        for end in ("_old", ".bak", "2", ".dp1x"):
            (run_dir / f"{stem}{end}.jsonl").write_text(text)
    run = opened()
    assert table(run)["total"] == 3 * STEP
    with closing(run.index.connect()) as connection:
        assert connection.execute("SELECT count(*) FROM files").fetchone()[0] == 2


def test_rows_of_a_step_are_in_the_order_of_the_replicas(tmp_path):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    (folder / "rollouts.jsonl").unlink()
    names = ["rollouts", *(f"rollouts.dp{replica}" for replica in range(1, 12))]
    for name in names:
        append(folder / f"{name}.jsonl", [make_rollout(1, "Q0/0", "trained", name)[0]])
    run = Run(folder, tmp_path / "cache")
    run.update()
    assert [row["key"] for row in table(run, order="asc")["rows"]] == [
        f"1/{name}/Q0%2F0" for name in names
    ]


@pytest.mark.parametrize("few", [0, index_module.BATCH])
@pytest.mark.parametrize("filters", [(), ({"column": "step", "op": ">", "value": 0},)])
def test_ties_keep_the_order_of_the_files_and_empty_values_come_last(
    tmp_path, monkeypatch, few, filters
):
    """In both orders, for every sort of both tables, with and without an index: pages then hold
    every row once.
    """
    monkeypatch.setattr(query_module, "FEW", few)
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for name in ("rollouts", "trained"):
        (folder / f"{name}.jsonl").unlink()
    # two responses a group: mean 0.5, 0.75, 0.0, 0.75
    rewards = [0.5, None, 1.0, 0.5, None, 0.0, 1.0, 0.5]
    prompts = ("Q7", "Q1", "Q5", "Q3")
    lines = [
        lines[0] | {"id": f"{prompts[n // 2]}/{n % 2}", "reward": reward}
        for n, reward in enumerate(rewards)
    ]
    append(folder / "rollouts.jsonl", lines)
    run = Run(folder, tmp_path / "cache")
    run.update()

    def order(page, name, sort, order):
        rows = [
            row
            for at in (0, 3, 6)
            for row in table(run, page, sort=sort, order=order, offset=at, limit=3)["rows"]
        ]
        return [row[name] for row in rows]

    def table(run, page, **query):
        with closing(run.index.connect()) as connection:
            return page(connection, Query(filters=filters, **query))

    ids = [line["id"] for line in lines]
    rising = [ids[n] for n in (5, 0, 3, 7, 2, 6, 1, 4)]
    falling = [ids[n] for n in (6, 2, 7, 3, 0, 5, 4, 1)]
    assert order(rollouts_page, "id", "reward", "asc") == rising
    assert order(rollouts_page, "id", "reward", "desc") == falling
    for sort in ("step", "kl", "flip_frac", "turns"):  # equal or empty in all rows
        assert (
            order(rollouts_page, "id", sort, "asc") == ids
            and order(rollouts_page, "id", sort, "desc") == ids[::-1]
        )
    keys = [f"1/rollouts/{prompt}" for prompt in prompts]
    for sort in ("step", "kl", "count"):
        assert (
            order(groups_page, "key", sort, "asc") == keys
            and order(groups_page, "key", sort, "desc") == keys[::-1]
        )
    assert order(groups_page, "key", "reward_mean", "asc") == [keys[n] for n in (2, 0, 1, 3)]
    assert order(groups_page, "key", "reward_mean", "desc") == [keys[n] for n in (3, 1, 0, 2)]


# Folders ------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    for folder, text in (
        (tmp_path, "no config.toml, metrics.jsonl or rollouts"),
        (tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(NoRunError, match=text):
            Run(folder, tmp_path / "cache")
        assert main([str(folder), "--cache", str(tmp_path / "cache")]) == 2
        assert str(folder) in capsys.readouterr().err


def test_links_that_leave_the_run_are_not_followed(run_dir, tmp_path, opened):
    secret = tmp_path / "secret.jsonl"
    append(secret, [make_rollout(9, "Q0/0", "trained", "rollouts")[0]])
    (run_dir / "rollouts.dp1.jsonl").symlink_to(secret)
    save_file({"Q0/0:tokens": np.arange(3)}, tmp_path / "outside.safetensors")
    (run_dir / "rollouts_000009.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert table(opened())["total"] == 3 * STEP
    for name in (
        "rollouts_000009.safetensors",
        "../outside.safetensors",
        "/etc/passwd",
        "metrics.jsonl",
    ):
        with pytest.raises(ShardError, match="not a file of the run"):
            TensorFile(run_dir, name)


def test_a_run_of_version_0_1(tmp_path, run_dir):
    """Its metrics have former names and steps from 0, its config former settings, its rollouts one
    policy version.
    """
    fixtures = Path(__file__).parents[2] / "fixtures/run_0_1_0"
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("metrics.jsonl", "config.toml"):
        (folder / name).write_text((fixtures / name).read_text())
    line = make_rollout(1, "Q0/0", "trained", "rollouts")[0]
    del line["policy_versions"], line["episode"], line["num_turns"], line["environment_length"]
    append(folder / "rollouts.jsonl", [line | {"policy_version": 3}])
    run = Run(folder, tmp_path / "cache")
    run.update()
    assert run.warnings() == []
    assert (
        run.metrics.table()["steps"][0] == 1
        and "logratio/train_infer_p99" in run.metrics.table()["metrics"]
    )
    assert "rollout.weight_sync" in run.config()[0]
    (row,) = table(run)["rows"]
    assert row["versions"] == "3" and row["turns"] == 1 and row["has_tensors"] is False


@pytest.mark.parametrize("text", ["[run\n", "run = 3\n", "\xff\xfe"])
def test_a_config_that_cannot_be_read(run_dir, opened, text):
    (run_dir / "config.toml").write_bytes(text.encode("latin1"))
    run = opened()
    (warning,) = run.warnings()
    assert warning.startswith("config.toml: ") and table(run)["total"] == 3 * STEP
    assert run.summary(0)["num_steps"] is None and run.pieces([]) is None


def test_steps_written_again_raise_the_revision_of_the_metrics(run_dir, opened):
    run = opened()
    add_metrics(run_dir, 2, **{"train/entropy": 7.0})
    run.update()
    assert run.metrics.revision == 1 and run.metrics.table()["metrics"]["train/entropy"] == [
        1.0,
        7.0,
        1.0,
    ]
    append(run_dir / "metrics.jsonl", [{"step": 3, "policy_version": 3, "eval/heldout/avg@4": 0.5}])
    run.update()
    table = run.metrics.table()
    assert table["steps"] == [1, 2, 3] and table["evaluations"] == {
        "steps": [3],
        "metrics": {"eval/heldout/avg@4": [0.5]},
    }


def test_the_last_step_is_read_while_another_thread_adds_steps(run_dir, opened):
    metrics = opened().metrics

    class Steps(dict):
        def items(self):
            assert metrics._lock.locked()
            return super().items()

        def values(self):
            assert metrics._lock.locked()
            return super().values()

    metrics._metrics, metrics._per_layer = Steps(metrics._metrics), Steps(metrics._per_layer)
    assert metrics.last_step == 3 and metrics.num_layers > 0


# Tensors ------------------------------------------------------------------------------------------


def test_missing_and_damaged_tensors_are_named(run_dir, opened):
    path = run_dir / "rollouts_000002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (run_dir / "trained_000001.safetensors").unlink()
    save_file(
        {"a:tokens": np.arange(2)}, run_dir / "trained_000003.safetensors", metadata={"schema": "2"}
    )
    run = opened()
    warnings = run.warnings()
    assert [warning.partition(":")[0] for warning in warnings] == [
        "rollouts_000002.safetensors",
        "trained_000003.safetensors",
    ]
    assert "damaged or still being written" in warnings[0] and "schema 2, must be 1" in warnings[1]
    flags = {row["step"]: row["has_tensors"] for row in table(run)["rows"]}
    assert flags == {1: True, 2: False, 3: True}


def test_tensors_that_come_after_the_lines(run_dir, opened):
    path = run_dir / "rollouts_000003.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    run = opened()
    assert (
        not any(row["has_tensors"] for row in table(run)["rows"] if row["step"] == 3)
        and run.warnings()
    )
    path.write_bytes(content)
    run.update()
    assert all(row["has_tensors"] for row in table(run)["rows"]) and run.warnings() == []


def test_tensors_that_were_deleted_or_stay_damaged(run_dir, opened, monkeypatch):
    damaged = run_dir / "rollouts_000001.safetensors"
    damaged.write_bytes(b"damaged")
    run = opened()
    (run_dir / "rollouts_000002.safetensors").unlink()
    read = []
    monkeypatch.setattr(
        index_module,
        "TensorFile",
        lambda folder, name: read.append(name) or TensorFile(folder, name),
    )
    run.update()
    assert read == [], "a file that did not change is not read again"
    assert {row["step"]: row["has_tensors"] for row in table(run)["rows"]} == {
        1: False,
        2: False,
        3: True,
    }
    assert [text.partition(":")[0] for text in run.warnings()] == [damaged.name]
    assert [text.partition(":")[0] for text in opened().warnings()] == read == [damaged.name], (
        "a new start tries again"
    )
    damaged.unlink()
    run.update()
    assert run.warnings() == []


def test_lines_that_come_after_the_tensors(run_dir, opened):
    path = run_dir / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: 2 * STEP + 3]))
    run = opened()
    path.write_text("".join(lines))
    run.update()
    found = table(run)
    assert found["total"] == 3 * STEP and all(
        row["has_tensors"] and row["kl"] for row in found["rows"]
    )


@pytest.mark.parametrize("at", [0, 4, 8, 9])
@pytest.mark.parametrize("bytes_", [b"", b"\xff\xff\xff\xff", b"}}}}", b'"a":'])
def test_any_damage_of_a_header_is_a_shard_error(run_dir, at, bytes_):
    path = run_dir / "rollouts_000001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes_ + (content[at + len(bytes_) :] if bytes_ else b""))
    with pytest.raises(ShardError, match=r"^rollouts_000001.safetensors: "):
        shard = TensorFile(run_dir, path.name)
        for name in shard.ids:
            shard.get(name, "tokens")


def test_a_shard_holds_what_safetensors_wrote(run_dir):
    arrays = {
        f"Q0/0:{number}": np.arange(6).reshape(2, 3).astype(dtype)
        for number, dtype in enumerate(["?", "u1", "i1", "u2", "i2", "i4", "i8", "f2", "f4", "f8"])
    }
    save_file(arrays, run_dir / "rollouts_000001.safetensors")
    shard = TensorFile(run_dir, "rollouts_000001.safetensors")
    assert shard.ids == ["Q0/0"] and shard.get("Q0/0", "x") is None
    for name, array in arrays.items():
        found = shard.get("Q0/0", name.rpartition(":")[2])
        assert found.dtype == array.dtype and found.shape == (2, 3) and (found == array).all()


def test_a_file_that_was_read_in_part_is_read_to_its_end_by_the_next(
    run_dir, opened, tmp_path, monkeypatch
):
    """Ctrl-C may come between two transactions."""
    monkeypatch.setattr(index_module, "BATCH", 3)
    run = Run(run_dir, tmp_path / "cache")
    stop = Event()
    stop.set()
    run.index.update(stop)
    assert 0 < table(run)["total"] < 3 * STEP
    assert table(opened())["total"] == 3 * STEP


def test_words_without_a_letter_and_endless_numbers():
    assert query_module.search_words("_ foo") == '"foo" *'
    with pytest.raises(query_module.QueryError, match="must have a letter"):
        query_module.search_words("_")
    with pytest.raises(query_module.QueryError, match="must be STEP"):
        chosen_steps([1, 2], "9" * 5000)


def test_a_header_of_thousands_of_brackets_is_a_damaged_file(run_dir):
    name = next(path.name for path in run_dir.rglob("*.safetensors"))
    path = next(run_dir.rglob(name))
    header = b"[" * 100_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ShardError, match="damaged or still being written: RecursionError"):
        TensorFile(run_dir, str(path.relative_to(run_dir)))
