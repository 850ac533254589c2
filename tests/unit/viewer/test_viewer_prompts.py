"""The same prompt in two runs: its key in the index, its steps, and the list of common prompts."""

import json
import sqlite3
from contextlib import closing

import pytest

from megatron_rl_viewer import index as index_module
from megatron_rl_viewer import prompts as prompts_module
from megatron_rl_viewer.index_rows import prompt_key
from megatron_rl_viewer.run_folder import Run
from tests.viewer_run import append, make_rollout, write_config, write_run

HOSTILE = "<img src=x onerror='window.HACKED = 1'> 2+2="
OLD_SCHEMA = """
CREATE TABLE rollouts(number INTEGER PRIMARY KEY, step INT, file TEXT, id TEXT, group_key TEXT);
CREATE TABLE groups(number INTEGER PRIMARY KEY, step INT, file TEXT, key TEXT UNIQUE, first INT);
CREATE TABLE shards(name TEXT PRIMARY KEY, size INT, modified INT, error TEXT);
INSERT INTO rollouts VALUES (1, 1, 'rollouts', 'Q0/0', '1/rollouts/Q0');
PRAGMA user_version = 2;
"""


def write_groups(folder, groups):
    """Write a run of (step, id of the prompt, its text, rewards) without tensors."""
    folder.mkdir()
    write_config(folder, steps=200)
    for step, name, prompt, rewards in groups:
        lines = [
            make_rollout(step, f"Q0/{k}", "trained", "rollouts")[0]
            | {"id": f"{name}/{k}", "prompt_id": name, "prompt": prompt, "reward": reward}
            for k, reward in enumerate(rewards)
        ]
        append(folder / "rollouts.jsonl", lines)
    return folder


@pytest.fixture
def two(tmp_path, open_runs, client_of):
    """A client of two runs that have prompts in common, at other steps and under other ids."""
    a = [
        (1, "Q0", "1+1=", [1.0, 0.0]), (1, "Q1", HOSTILE, [1.0, 1.0]), (2, "Q2", "3+3=", [0.0]),
        (3, "Q0", "1+1=", [1.0, 1.0]), (3, "Q0#1", "1+1=", [0.0, 0.0, 0.0]),
    ]  # fmt: skip
    b = [
        (2, "P7", "1+1=", [0.5]), (5, "P8", HOSTILE, [0.0, 0.0]), (6, "P9", "4+4=", [1.0]),
        (6, "P3", "5+5=", [None]),
    ]  # fmt: skip
    return client_of(open_runs(write_groups(tmp_path / "a", a), write_groups(tmp_path / "b", b)))


def prompt(client, run, text, **arguments):
    answer = client.get(f"/api/runs/{run}/prompt", params={"key": prompt_key(text), **arguments})
    assert answer.status_code == 200, answer.text
    return answer.json()


def steps_of(answer):
    return [(group["step"], group["count"], group["reward_mean"]) for group in answer["groups"]]


def test_a_prompt_has_its_groups_of_every_step(two):
    first, second = prompt(two, 0, "1+1="), prompt(two, 1, "1+1=")
    assert steps_of(first) == [(1, 2, 0.5), (3, 2, 1.0), (3, 3, 0.0)] and first["next"] is None
    assert steps_of(second) == [(2, 1, 0.5)] and second["key"] == first["key"]
    keys = [row["key"] for row in first["groups"][2]["responses"]]
    assert keys == ["3/rollouts/Q0%231%2F0", "3/rollouts/Q0%231%2F1", "3/rollouts/Q0%231%2F2"]
    for key in keys:
        rollout = two.get(f"/api/runs/0/rollout/{key}").json()
        assert rollout["prompt_key"] == first["key"]
    rows = two.get("/api/runs/1/rollouts").json()["rows"]
    assert {row["prompt_key"] for row in rows if row["prompt"] == "1+1="} == {first["key"]}


def test_the_whole_text_of_a_prompt_is_answered(tmp_path, open_runs, client_of):
    text = f"{HOSTILE}\n" + "x" * 5000
    folder = write_groups(tmp_path / "a", [(1, "Q0", text, [1.0])])
    client = client_of(open_runs(folder))
    answer = prompt(client, 0, text)
    assert answer["prompt"] == text and answer["missing"] == []
    (folder / "rollouts.jsonl").write_text("{}\n")
    answer = prompt(client, 0, text)
    assert answer["prompt"] == text[:200] and "written again" in answer["missing"][0]


def test_messages_are_a_prompt_too(tmp_path, open_runs, client_of):
    messages = [{"role": "user", "content": "hello"}]
    client = client_of(open_runs(write_groups(tmp_path / "a", [(1, "Q0", messages, [1.0])])))
    assert "hello" in prompt(client, 0, messages)["prompt"]


def test_many_steps_come_in_parts(tmp_path, open_runs, client_of, monkeypatch):
    monkeypatch.setattr(prompts_module, "STEPS", 3)
    groups = [(step, f"Q{n}", "1+1=", [1.0]) for step in range(1, 8) for n in (0, 1)]
    client = client_of(open_runs(write_groups(tmp_path / "a", groups)))
    after, steps = -1, []
    while after is not None:
        part = prompt(client, 0, "1+1=", after=after)
        steps.append([group["step"] for group in part["groups"]])
        after = part["next"]
    assert steps == [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6], [7, 7]]
    assert prompt(client, 0, "1+1=", after=7)["groups"] == []


def test_an_episode_of_several_sequences_is_one_response(tmp_path, open_runs, client_of):
    folder = write_groups(tmp_path / "a", [(1, "Q0", "1+1=", [1.0])])
    line = json.loads((folder / "rollouts.jsonl").read_text())
    append(folder / "rollouts.jsonl", [line | {"id": "Q0/1/0", "episode": "Q0/1"}])
    append(folder / "rollouts.jsonl", [line | {"id": "Q0/1"}])
    (group,) = prompt(client_of(open_runs(folder)), 0, "1+1=")["groups"]
    assert [row["id"] for row in group["responses"]] == ["Q0/0", "Q0/1"] and group["count"] == 2


@pytest.mark.parametrize(
    "query, status, message",
    [
        (f"key={prompt_key('9+9=')}", 404, f"no prompt {prompt_key('9+9=')}"),
        (f"key={prompt_key('4+4=')}", 404, "no prompt"),  # of the other run alone
        (f"key={'a' * 60_000}", 400, "must be 16 hexadecimal digits"),
        ("key=1%2B1%3D", 400, "must be 16 hexadecimal digits"),
        ("key=", 400, "must be 16 hexadecimal digits"),
        ("", 400, "key = "),
        (f"key={prompt_key('1+1=')}&after={2**70}", 400, "after = "),
    ],
    ids=range(7),
)
def test_a_key_names_a_prompt_or_is_refused(two, query, status, message):
    answer = two.get(f"/api/runs/0/prompt?{query}")
    assert answer.status_code == status and message in answer.json()["detail"]
    assert len(answer.text) < 1000


def test_prompts_of_both_runs_by_the_difference_of_their_rewards(two):
    table = two.get("/api/prompts?run=0&run=1").json()
    assert [(row["prompt"], row["rewards"], row["groups"]) for row in table["rows"]] == [
        (HOSTILE, [1.0, 0.0], [1, 1]),
        ("1+1=", [0.5, 0.5], [3, 1]),
    ]
    assert [row["difference"] for row in table["rows"]] == [1.0, 0.0] and table["total"] == 2
    assert [row["key"] for row in table["rows"]] == [prompt_key(HOSTILE), prompt_key("1+1=")]
    second = two.get("/api/prompts?run=0&run=1&offset=1&limit=1").json()
    assert second["rows"] == table["rows"][1:] and second["total"] == 2


def test_a_list_shows_where_prompts_differ(tmp_path, open_runs, client_of):
    texts = {"Solve this step by step.\n" * 20 + f"Find the {n} of x." for n in ("sum", "square")}
    groups = [(1, f"Q{n}", text, [1.0]) for n, text in enumerate(sorted(texts))]
    client = client_of(open_runs(write_groups(tmp_path / "a", groups)))
    rows = client.get("/api/prompts?run=0").json()["rows"]
    assert {row["prompt"] for row in rows} == {"... sum of x.", "... square of x."}
    (row,) = client.get("/api/prompts?run=0&limit=1").json()["rows"]
    assert row["prompt"] in {text[:200] for text in texts}


def test_a_prompt_without_rewards_comes_last(two):
    table = two.get("/api/prompts?run=1").json()
    assert [row["prompt"] for row in table["rows"]][-1] == "5+5=" and table["total"] == 4
    assert table["rows"][-1]["difference"] is None


@pytest.mark.parametrize(
    "query, status, message",
    [("", 400, "run = "), ("run=0&run=7", 404, "no run 7"), ("run=x", 400, "= x: "),
     ("run=0&limit=5000", 400, "limit = 5000"), ("run=0&offset=-1", 400, "offset = -1")],
)  # fmt: skip
def test_arguments_that_name_no_runs_or_page(two, query, status, message):
    answer = two.get(f"/api/prompts?{query}")
    assert answer.status_code == status
    assert message in answer.json()["detail"]


def test_an_index_of_the_former_version_is_built_again(tmp_path, client_of, open_runs):
    folder = write_run(tmp_path / "run", steps=2, tokenizer=False)
    cache = tmp_path / "cache"
    path = index_module.database_path(folder, cache)
    cache.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD_SCHEMA)
    run = Run(folder, cache)
    assert run.index.progress == 0.0
    runs = open_runs(folder)
    answer = prompt(client_of(runs), 0, "10+2=")
    assert [group["step"] for group in answer["groups"]] == [2]
    assert runs.runs[0].index.progress is None


def test_groups_of_a_step_that_is_written_again_are_replaced(tmp_path, open_runs, client_of):
    folder = write_groups(tmp_path / "a", [(1, "Q0", "1+1=", [1.0]), (2, "Q0", "1+1=", [1.0])])
    runs = open_runs(folder)
    client = client_of(runs)
    line = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[1])
    append(folder / "rollouts.jsonl", [line | {"prompt": "8+8=", "reward": 0.0}])
    runs.runs[0].update()
    assert steps_of(prompt(client, 0, "1+1=")) == [(1, 1, 1.0)]
    assert steps_of(prompt(client, 0, "8+8=")) == [(2, 1, 0.0)]
