"""Every path of the viewer's server: what it answers, who may ask, and that a model's text stays
data.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from fastapi.testclient import TestClient

from megatron_rl_viewer import token_data
from megatron_rl_viewer.app import create_app
from megatron_rl_viewer.index_rows import prompt_key
from megatron_rl_viewer.run_folder import Runs
from megatron_rl_viewer.view_command import main, serve_pages
from tests.unit.viewer.conftest import TOKEN
from tests.viewer_run import (
    GROUP,
    LAYERS,
    PROMPTS,
    add_step,
    append,
    make_rollout,
    write_config,
    write_run,
)

PATHS = (
    "/", "/static/app.js", "/api/runs", "/api/runs/0/metrics", "/api/runs/0/events",
    "/api/runs/0/config", "/api/diff?a=0&b=0",
    "/api/runs/0/health", "/api/runs/0/story", "/api/runs/0/rollouts", "/api/runs/0/groups",
    "/api/runs/0/rollout/1/rollouts/Q0%2F0",
    "/api/runs/0/experts", "/api/prompts?run=0",
    f"/api/runs/0/prompt?key={prompt_key('10+1=')}",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token(path, run_dir, open_runs, static):
    client = TestClient(create_app(open_runs(run_dir), TOKEN, static=static, follow=False))
    for headers in (
        {},
        {"cookie": "megatron_rl_view_0=wrong"},
        {"authorization": f"Bearer {TOKEN}"},
    ):
        refused = client.get(path, headers=headers)
        assert (
            refused.status_code == 401
            and "demo" not in refused.text
            and not refused.headers.get("set-cookie")
        )
    wrong = f"{path}{'&' if '?' in path else '?'}token=wrong%C3%A9"
    assert client.get(wrong).status_code == 401
    first = client.get(wrong.replace("wrong%C3%A9", TOKEN), follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == path
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_only_get_and_no_other_site(path, client):
    answer = client.get(path)
    policy = answer.headers["content-security-policy"]
    assert (
        "default-src 'self'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    assert (
        answer.headers["x-content-type-options"] == "nosniff"
        and answer.headers["cache-control"] == "no-store"
    )
    foreign = client.get(path, headers={"origin": "http://evil.example"})
    assert not [name for name in foreign.headers if name.startswith("access-control")]
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/docs", "/openapi.json", "/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/x", "/api"],
)
def test_there_is_nothing_else(path, client):
    assert client.get(path).status_code == 404


def test_runs(client, run_dir):
    (run,) = client.get("/api/runs").json()
    assert (
        run["name"] == "demo"
        and Path(run["path"]) == run_dir
        and run["steps"] == run["num_steps"] == 6
    )
    assert (
        run["live"] is False
        and run["has_tensors"]
        and run["warnings"] == []
        and run["indexing"] is None
    )
    assert run["rollouts"] == 6 * PROMPTS * GROUP


def test_metrics(client):
    table = client.get("/api/runs/0/metrics").json()
    assert table["steps"] == [1, 2, 3, 4, 5, 6]
    assert table["metrics"]["rollout/reward_mean"] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert [len(row) for row in table["per_layer"]["routing/flip_rate"]] == [LAYERS] * 6
    later = client.get("/api/runs/0/metrics?after=4&names=train/entropy,optim/grad_norm").json()
    assert later["steps"] == [5, 6] and sorted(later["metrics"]) == [
        "optim/grad_norm",
        "train/entropy",
    ]
    assert later["labels"]["optim/grad_norm"] == "gradient norm"


def test_events_and_settings(client):
    assert [event["kind"] for event in client.get("/api/runs/0/events?after=5").json()] == [
        "weight_sync",
        "stop",
    ]
    config = client.get("/api/runs/0/config").json()
    assert "[run]" in config["text"] and config["values"]["run.num_steps"] == 6


def test_settings_that_differ(run_dir, tmp_path, open_runs, client_of):
    other = tmp_path / "other"
    other.mkdir()
    write_config(other, steps=9)
    found = {
        each["key"]: each
        for each in client_of(open_runs(run_dir, other)).get("/api/diff?a=0&b=1").json()
    }
    assert (found["run.num_steps"]["a"], found["run.num_steps"]["b"]) == (6, 9)
    assert found.keys() == {"run.num_steps", "run.name", "run.dir", "model.path"}


def test_health_of_a_healthy_run(client):
    (finding,) = client.get("/api/runs/0/health").json()
    assert finding["level"] == "ok" and finding.keys() >= {"try", "since_step", "metric", "guide"}


# Tables -------------------------------------------------------------------------------------------


def rows(client, table="rollouts", **arguments):
    filters = {"filter": json.dumps(arguments.pop("filters"))} if "filters" in arguments else {}
    answer = client.get(f"/api/runs/0/{table}", params={"limit": 1000, **arguments, **filters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_pages_hold_every_row_once(client):
    everything = rows(client)
    assert everything["total"] == len({row["key"] for row in everything["rows"]}) == 96
    for sort in [column["name"] for column in everything["columns"] if column["filter"]]:
        for order in ("asc", "desc"):
            pages = [
                rows(client, sort=sort, order=order, offset=at, limit=20)["rows"]
                for at in range(0, 100, 20)
            ]
            keys = [row["key"] for page in pages for row in page]
            assert len(keys) == len(set(keys)) == 96, (sort, order)
            if sort not in ("versions",):
                values = [row[sort] for page in pages for row in page]
                assert values == sorted(values, reverse=order == "desc"), (sort, order)


@pytest.mark.parametrize(
    "filters, expected",
    [
        ([{"column": "reward", "op": ">=", "value": 0.5}], lambda row: row["reward"] >= 0.5),
        ([{"column": "length", "op": "<", "value": 9}, {"column": "step", "op": "!=", "value": 2}],
         lambda row: row["length"] < 9 and row["step"] != 2),
        ([{"column": "finish_reason", "op": "=",
        "value": "length"}], lambda row: row["finish_reason"] == "length"),
        ([{"column": "id", "op": "contains", "value": "Q1"}], lambda row: "Q1" in row["id"]),
        ([{"column": "id", "op": "contains", "value": "%"}], lambda row: False),
        ([{"column": "turns", "op": ">", "value": "1"}], lambda row: row["turns"] > 1),
        ([{"column": "has_tensors", "op": "=", "value": True}], lambda row: row["has_tensors"]),
        ([{"column": "flip_frac", "op": ">", "value": 0.1}], lambda row: row["flip_frac"] > 0.1),
        ([{"column": "group", "op": "=",
        "value": "2/rollouts.dp1/Q1"}], lambda row: row["group"] == "2/rollouts.dp1/Q1"),
    ],
)  # fmt: skip
def test_filters(client, filters, expected):
    found, everything = rows(client, filters=filters), rows(client)["rows"]
    assert {row["key"] for row in found["rows"]} == {
        row["key"] for row in everything if expected(row)
    }
    assert found["total"] == len(found["rows"])


@pytest.mark.parametrize(
    "conditions, expected",
    [
        ([("=", 0.1)], [0.1]), ([("<=", 0.1)], [0.1]), ([("<", 0.1)], []), ([(">", 0.1)], [0.8]),
        ([(">=", 0.2), ("<=", 0.8)], [0.8]), ([("!=", 0.8)], [0.1]), ([("contains", "0.8")], [0.8]),
        ([("=", float(np.float32(0.1)))], [0.1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_double", [True, False])
def test_a_filter_compares_the_rewards_that_the_table_shows(
    tmp_path, open_runs, client_of, conditions, expected, is_double
):
    """Rewards are float32: 0.1 may be written as 0.10000000149011612."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, steps=1)
    lines = [
        make_rollout(1, f"Q{prompt}/{k}", "trained", "rollouts")[0]
        | {"reward": float(np.float32(reward)) if is_double else reward}
        for prompt, reward in ((0, 0.1), (1, 0.8))
        for k in range(3)
    ]
    append(folder / "rollouts.jsonl", lines)
    client = client_of(open_runs(folder))
    for table, name, copies in (("rollouts", "reward", 3), ("groups", "reward_mean", 1)):
        filters = [{"column": name, "op": op, "value": value} for op, value in conditions]
        shown = [row[name] for row in rows(client, table, filters=filters)["rows"]]
        assert shown == expected * copies


def test_a_filter_of_a_count_is_exact(tmp_path, open_runs, client_of):
    """2**24 + 1 is no float32."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, steps=1)
    line = make_rollout(1, "Q0/0", "trained", "rollouts")[0]
    append(folder / "rollouts.jsonl", [line | {"response_length": 2**24 + 1}])
    client = client_of(open_runs(folder))
    for value, total in ((2**24, 0), (2**24 + 1, 1)):
        filters = [{"column": "length", "op": "=", "value": value}]
        assert rows(client, filters=filters)["total"] == total


def test_full_text(client):
    """Words anywhere in prompt or response, as they begin; all of them; a phrase between quotes."""
    everything = rows(client)["rows"]
    full = {row["key"]: row["prompt"] + " " + row["response"] for row in everything}
    assert {row["key"] for row in rows(client, q="CARR")["rows"]} == {
        key for key, text in full.items() if "carry" in text
    }
    both = {row["key"] for row in rows(client, q="carry wait")["rows"]}
    assert both == {key for key, text in full.items() if "carry" in text and "wait" in text}
    phrase = {row["key"] for row in rows(client, q='"the carry"')["rows"]}
    assert phrase == {key for key, text in full.items() if "the carry" in text} and phrase
    assert rows(client, q="10+3=")["total"] == GROUP
    assert rows(client, q='NEAR(a" OR *')["total"] == 0
    assert rows(client, "groups", q="10+3=")["total"] == 1


@pytest.mark.parametrize(
    "query, message",
    [
        ("sort=rowid", "sort = rowid: must be one of step"), ("order=up", "asc or desc"),
        ("limit=0", "limit = 0"),
        ("limit=5000", "1..1000"), ("offset=-1", "offset = -1"), ("limit=abc", "limit = abc"),
        ("q==", "letter or a digit"),
        ("filter=x", "not JSON"), ("filter=[1]", "must be a list"), ("sort=prompt",
        "must be one of"),
        ('filter=[{"column":"x;drop","op":"=","value":1}]', "column = x;drop"),
        ('filter=[{"column":"step","op":"OR","value":1}]', "op = OR"),
        ('filter=[{"column":"step","op":"=","value":"many"}]', "must be a number"),
        ('filter=[{"column":"step","op":"=","value":null}]', "value = None"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_query_are_named(client, query, message):
    for table in ("rollouts", "groups"):
        answer = client.get(f"/api/runs/0/{table}?{query}")
        assert answer.status_code == 400 and message in answer.json()["detail"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"offset": str(2**70)}, "offset = "), ({"q": "a\0b"}, "without NUL"), ({"q": "a" * 60_000},
        "10000 characters"),
        ({"q": "a " * 5000}, "at most 100 words"), ({"filter": "[" * 10_000}, "not JSON"),
        ({"filter": '[{"column": "reward", "op": "<", "value": 1' + "0" * 400 + "}]"},
        "a number of at most"),
        ({"filter": '[{"column": "id", "op": "=", "value": "\\ud800"}]'}, "characters of Unicode"),
        ({"filter": '[{"column": "\\ud800", "op": "=", "value": 1}]'}, "column = "),
        ({"filter": '[{"column": "id", "op": "\\ud800", "value": 1}]'}, "op = "),
        ({"filter": '[{"column": "id", "op": "=", "value": ["\\ud800"]}]'}, "value = "),
        ({"filter": '[{"column": "id", "op": [1], "value": 1}]'}, "op = [1]"),
        ({"filter": '[{"column": "id", "op": "contains", "value": "' + "a" * 60_000 + '"}]'},
        "10000 characters"),
        ({"sort": "\0"}, "sort = "), ({"filter": json.dumps([{"column": "step", "op": "=",
        "value": 1}] * 101)}, "at most 100"),
    ],
    ids=range(14),
)  # fmt: skip
def test_arguments_that_sqlite_does_not_take_are_named(
    client, arguments, message, run_dir, tmp_path, static, monkeypatch, capsys
):
    for table in ("rollouts", "groups"):
        answer = client.get(f"/api/runs/0/{table}", params=arguments)
        assert answer.status_code == 400, table
        if table == "rollouts":
            assert message in answer.json()["detail"]
    if "filter" in arguments:
        monkeypatch.setattr("megatron_rl_viewer.app.STATIC", static)
        given = [
            str(run_dir),
            "--cache",
            str(tmp_path / "cache"),
            "--export",
            str(tmp_path / "out"),
            "--filter",
        ]
        assert main([*given, arguments["filter"]]) == 2
        assert message in capsys.readouterr().err


def test_groups(client):
    table = rows(client, "groups", sort="reward_mean", order="asc")
    assert table["total"] == 6 * PROMPTS
    for row in table["rows"]:
        members = rows(client, filters=[{"column": "group", "op": "=", "value": row["key"]}])[
            "rows"
        ]
        rewards = [member["reward"] for member in members]
        assert row["count"] == len(members) == GROUP and row["prompt"] == members[0]["prompt"]
        assert row["reward_mean"] == pytest.approx(sum(rewards) / GROUP) and row[
            "reward_max"
        ] == max(rewards)
        assert row["length_mean"] == pytest.approx(
            sum(member["length"] for member in members) / GROUP
        )


# A model's text -----------------------------------------------------------------------------------


def test_html_of_a_response_stays_data(client):
    for path in ("/api/runs/0/rollouts", "/api/runs/0/rollout/1/rollouts/Q0%2F0"):
        answer = client.get(path)
        assert (
            answer.headers["content-type"] == "application/json" and "<script>alert(" in answer.text
        )
    table = rows(client)["rows"]
    assert all(row["response"].startswith("<script>alert(") for row in table)


@pytest.mark.parametrize(
    "key",
    ["../../etc/passwd", "1/../../../etc/passwd", "1/rollouts/nothing", "x", "1/trained/Q0%2F0",
    "1/rollouts",
     "99999999999999999999/rollouts/a", "%C2%B2/rollouts/a"],
)  # fmt: skip
def test_a_key_names_a_rollout_or_nothing(client, key):
    assert client.get(f"/api/runs/0/rollout/{key}").status_code == 404
    assert client.get("/api/runs/7/rollout/1/rollouts/Q0%2F0").status_code == 404


def test_a_rollout_whose_id_looks_percent_encoded_is_opened(tmp_path, open_runs, client_of):
    """Its key encodes the percent sign; decoded twice, the id would be that of another rollout."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, steps=1)
    line = make_rollout(1, "Q0/0", "trained", "rollouts")[0]
    names = ["%41/0", "A/0", "%2541/0", "50%/0", "a b+c/rollout/0", "\u00e9/0"]
    append(folder / "rollouts.jsonl", [line | {"id": name} for name in names])
    runs = open_runs(folder)
    client = client_of(runs)
    keys = {row["id"]: row["key"] for row in rows(client)["rows"]}
    assert list(keys) == names[::-1]
    for name, key in keys.items():
        for sent in (key, quote(key, safe="")):
            assert client.get(f"/api/runs/0/rollout/{sent}").json()["meta"]["id"] == name
        # as an export asks for it
        assert token_data.rollout(runs.runs[0], key)["meta"]["id"] == name


# Live ---------------------------------------------------------------------------------------------


def test_a_run_that_is_written_is_followed(tmp_path, static):
    """A thread appends steps, each line in two parts, while a client asks: only complete rows, and
    in the end all.
    """
    folder = write_run(tmp_path / "live", steps=1, tokenizer=False)
    write_config(folder, steps=9)
    (folder / "events.jsonl").unlink()
    runs = Runs([folder], tmp_path / "cache")
    with TestClient(create_app(runs, TOKEN, static=static)) as client:
        client.get(f"/?token={TOKEN}")

        def write():
            for step in range(2, 6):
                with open(folder / "rollouts.jsonl", "a") as file:
                    copy = tmp_path / f"step_{step}"
                    copy.mkdir()
                    add_step(copy, step)
                    for line in (copy / "rollouts.jsonl").read_text().splitlines(keepends=True):
                        file.write(line[:20])
                        file.flush()
                        file.write(line[20:])
                        file.flush()
                for name in ("metrics.jsonl", "trained.jsonl"):
                    with open(folder / name, "a") as file:
                        file.write((copy / name).read_text())
                for shard in copy.glob("*.safetensors"):
                    shard.rename(folder / shard.name)

        writer = threading.Thread(target=write)
        writer.start()
        totals, deadline = [], time.monotonic() + 60
        while not totals or totals[-1] < 5 * PROMPTS * GROUP:
            assert time.monotonic() < deadline, totals
            answer = client.get("/api/runs/0/rollouts", params={"limit": 1000}).json()
            assert all(row["response"] for row in answer["rows"])
            totals.append(answer["total"])
            time.sleep(0.05)
        writer.join()
        assert totals == sorted(totals)
        (run,) = client.get("/api/runs").json()
        assert run["live"] and run["steps"] == 5 and run["warnings"] == []
        while not all(
            row["has_tensors"] and row["kl"]
            for row in client.get("/api/runs/0/rollouts").json()["rows"]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.get("/api/runs/0/metrics?after=3").json()["steps"] == [4, 5]


def test_the_command_prints_a_url_that_works(run_dir, tmp_path):
    """A process of its own: it starts without torch, answers on the loopback, and stops on
    SIGINT.
    """
    code = "import sys; from megatron_rl_viewer.view_command import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(run_dir), "--port", "0", "--cache", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        url = lines[1].split()[-1]
        assert lines[1].startswith("open http://127.0.0.1:") and "token=" in url
        import httpx

        with httpx.Client(follow_redirects=True) as http:
            base, token = url.split("/?token=")
            assert http.get(f"{base}/api/runs").status_code == 401
            assert http.get(f"{base}/api/runs?token={token}").json()[0]["name"] == "demo"
    finally:
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors and process.returncode in (0, -2), errors


def test_without_its_dependencies_the_command_says_what_to_install(run_dir, tmp_path):
    """One line, and no traceback, from a Python that lacks uvicorn."""
    code = (
        "import sys; from importlib.machinery import PathFinder as P; find ="
        " P.find_spec\nP.find_spec = classmethod(lambda c, name, *a: None if name.partition('.')[0]"
        " == 'uvicorn' else find(name, *a))\nfrom megatron_rl_viewer.view_command import main;"
        " sys.exit(main())"
    )
    command = [sys.executable, "-c", code, str(run_dir), "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "megatron-rl view: uvicorn not installed; in a checkout: pip install ./viewer\n"
    )


@pytest.mark.parametrize(
    "host, url, warns",
    [("127.0.0.1", "127.0.0.1", False), ("localhost", "localhost", False), ("::1", "[::1]", False),
    ("0.0.0.0", "0.0.0.0", True)],
)  # fmt: skip
def test_the_address_that_is_printed(run_dir, open_runs, monkeypatch, capsys, host, url, warns):
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    code, shown = serve_pages(open_runs(run_dir), host, 0), capsys.readouterr()
    if ":" in host and code:
        pytest.skip(f"no IPv6 here: {shown.err}")
    assert f"open http://{url}:" in shown.out and ("warning" in shown.err) is warns


def test_other_log_handlers_stay_open(run_dir, open_runs, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    closed = []
    handler = logging.NullHandler()
    monkeypatch.setattr(handler, "close", lambda: closed.append(handler))
    serve_pages(open_runs(run_dir), "127.0.0.1", 0)
    assert not closed


def test_no_torch_is_imported():
    code = (
        "import sys, megatron_rl_viewer.app, megatron_rl_viewer.disk_copy; print('torch' in"
        " sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
