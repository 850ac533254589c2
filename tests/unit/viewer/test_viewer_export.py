"""The copy that opens from disk: what is in it, that a model's text cannot leave its string, and
refusals.
"""

import json
import re

import pytest

from megatron_rl_viewer import view_command
from megatron_rl_viewer.disk_copy import ExportError, script_json, write_copy
from megatron_rl_viewer.query import Query
from tests.viewer_run import append, make_rollout, write_run


def read(folder):
    text = (folder / "data.js").read_text(encoding="ascii")
    assert text.startswith("window.EXPORT = ") and text.endswith(";\n")
    return json.loads(text.removeprefix("window.EXPORT = ").removesuffix(";\n"))


def test_the_copy_holds_what_the_server_answers(run_dir, open_runs, client_of, static, tmp_path):
    runs = open_runs(run_dir)
    keys = ["2/rollouts/Q0%2F1", "5/rollouts.dp1/Q3%2F0"]
    page = write_copy(runs, tmp_path / "out", static, keys=keys)
    content, client = read(tmp_path / "out"), client_of(runs)
    responses = content["responses"]
    assert content["schema"] == 1 and page.read_text() == (static / "index.html").read_text()
    assert (tmp_path / "out/static/app.js").is_file() and not (
        tmp_path / "out/static/index.html"
    ).exists()
    for path in (
        "metrics",
        "events",
        "config",
        "health",
        "story",
        *(f"rollout/{key}" for key in keys),
    ):
        assert responses[f"runs/0/{path}"] == client.get(f"/api/runs/0/{path}").json(), path
    assert responses["runs/0/experts"] == client.get("/api/runs/0/experts?step=2:5").json()
    table = {
        row["key"]: row for row in client.get("/api/runs/0/rollouts?limit=1000").json()["rows"]
    }
    assert responses["runs/0/rollouts"]["rows"] == [table[key] for key in keys]
    groups = {row["key"]: row for row in client.get("/api/runs/0/groups?limit=1000").json()["rows"]}
    assert responses["runs/0/groups"]["rows"] == [groups[table[key]["group"]] for key in keys]
    assert responses["runs"][0]["path"] == "demo" and responses["runs"][0]["live"] is False


def test_rollouts_of_a_query(run_dir, open_runs, static, tmp_path):
    filters = [{"column": "reward", "op": "<", "value": 0.5}]
    write_copy(open_runs(run_dir), tmp_path / "out", static, query=Query(limit=3, filters=filters))
    responses = read(tmp_path / "out")["responses"]
    rows = responses["runs/0/rollouts"]["rows"]
    assert len(rows) == 3 and all(row["reward"] < 0.5 for row in rows)
    assert sum(path.startswith("runs/0/rollout/") for path in responses) == 3


HOSTILE = "</script><script>alert(1)</script><!--<script>\u2028 & \u4f60 \\u003c"


def test_a_models_text_cannot_leave_its_string(tmp_path, open_runs, static):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    append(
        folder / "rollouts.jsonl",
        [make_rollout(2, "Q0/0", "trained", "rollouts")[0] | {"response": HOSTILE}],
    )
    write_copy(open_runs(folder), tmp_path / "out", static, keys=["2/rollouts/Q0%2F0"])
    text = (tmp_path / "out/data.js").read_text(encoding="ascii")
    assert not re.search(r"[<>&]", text)
    rollout = read(tmp_path / "out")["responses"]["runs/0/rollout/2/rollouts/Q0%2F0"]
    assert rollout["meta"]["response"] == HOSTILE
    assert script_json({"a": float("nan"), "b": [float("inf"), 1.5]}) == '{"a":null,"b":[null,1.5]}'


def test_secrets_stay_here(tmp_path, open_runs, static, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "a-secret-value")
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    config = folder / "config.toml"
    config.write_text(config.read_text() + '\n[extra]\nnote = "a-secret-value"\n')
    write_copy(open_runs(folder), tmp_path / "out", static, keys=["1/rollouts/Q0%2F0"])
    assert (
        "a-secret-value" not in (tmp_path / "out/data.js").read_text()
        and "***" in (tmp_path / "out/data.js").read_text()
    )


def test_what_cannot_be_exported(run_dir, open_runs, static, tmp_path):
    runs = open_runs(run_dir)
    with pytest.raises(ExportError, match="no such rollout"):
        write_copy(runs, tmp_path / "out", static, keys=["9/rollouts/x"])
    with pytest.raises(ExportError, match="not built"):
        write_copy(runs, tmp_path / "out", tmp_path, keys=["1/rollouts/Q0%2F0"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="new or empty folder"):
        write_copy(runs, tmp_path / "full", static, keys=["1/rollouts/Q0%2F0"])
    assert not (tmp_path / "out").exists() and [*(tmp_path / "full").iterdir()] == [
        tmp_path / "full/notes.txt"
    ]


def test_the_command(run_dir, static, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megatron_rl_viewer.app.STATIC", static)
    base = [str(run_dir), "--cache", str(tmp_path / "cache"), "--export", str(tmp_path / "out")]
    assert view_command.main([*base, "--rollouts", "1/rollouts/Q0%2F0", "1/rollouts/Q0%2F1"]) == 0
    assert str(tmp_path / "out/index.html") in capsys.readouterr().out
    assert read(tmp_path / "out")["responses"]["runs/0/rollouts"]["total"] == 2
    # an earlier export may be written over
    assert view_command.main([*base, "--search", "carry", "--limit", "2"]) == 0
    assert read(tmp_path / "out")["responses"]["runs/0/rollouts"]["total"] == 2
    assert view_command.main([*base]) == 0
    assert read(tmp_path / "out")["responses"]["runs/0/rollouts"]["total"] == view_command.EXPORTED
    for wrong, message in (
        (["--filter", "x"], "not JSON"),
        (["--rollouts", "7"], "no such rollout"),
    ):
        assert view_command.main([*base, *wrong]) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        view_command.main([*base, "--limit", "0"])
    assert "must be a positive integer, got '0'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        view_command.main([str(run_dir), "--limit", "3"])
    assert "--limit has no effect without --export DIR" in capsys.readouterr().err
