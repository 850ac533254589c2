"""`megatron-rl top`: live, finished, failed and dead runs, many ranks, servers that do not answer,
80 and 120 columns.
"""

import json
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from megatron_rl.launch.status import SCHEMA, RankStatus, Status
from megatron_rl_tools.top import top
from megatron_rl_tools.top.render import name_of, render
from megatron_rl_tools.top.server_loads import Load, ask_load

NOW = time.time()
LOADS = [
    Load("http://127.0.0.1:30000", "12", 812.4, 16, 3, 0.12, 1.2),
    Load("http://10.0.0.2:1", problem="answers 401"),
]
RANKS = [
    RankStatus(0, "node01", "rollout of step 13", 1.2, "http://127.0.0.1:30000", 2 * 2**30),
    RankStatus(1, "node01", "rollout of step 13", 1.2, "", 2**30),
]
STATUS = Status(
    NOW - 1, started=NOW - 735, step=12, num_steps=60, step_seconds=4.13, ranks=RANKS,
    metrics={"rollout/reward_mean": 0.43, "rollout/tokens_per_second": 812.0,
    "train/kl_mu_pi": 1.2e-3},
)  # fmt: skip


def lines(status, loads=(), width=120, **options) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render("demo", status, loads, NOW, **{"every_rank": False, **options}))
    found = capture.get().splitlines()
    assert all(len(line) <= width for line in found)
    return [line.rstrip() for line in found]


def test_a_live_run():
    assert lines(STATUS, LOADS) == [
        "demo  running  step 12/60  for 12:14  4.1s a step, about 3:18 left",
        "reward 0.430  rollout 812 tokens/s  KL +1.2e-03",
        "",
        "rank  host    stage               seconds   memory  waits for",
        "0     node01  rollout of step 13      2.2  2.0 GiB  127.0.0.1:30000",
        "1     node01  rollout of step 13      2.2  1.0 GiB",
        "",
        "server                  weights  tokens/s  running  queued  KV used  memory",
        "http://127.0.0.1:30000      v12       812       16       3      12%  1.2 GB",
        "http://10.0.0.2:1 answers 401",
    ]
    assert lines(STATUS, LOADS, width=80) == lines(STATUS, LOADS)


def test_runs_that_have_ended():
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 200))
    ended = replace(STATUS, time=NOW - 200)
    assert lines(ended)[0] == f"demo  no heartbeat  step 12/60  since {since} (3:20 ago)"
    assert (
        lines(replace(ended, state="finished"))[0]
        == f"demo  finished  step 12/60  {since} (3:20 ago)"
    )
    failed = lines(replace(ended, state="failed", text="RuntimeError: no disk"))
    assert failed[0].startswith("demo  failed") and "RuntimeError: no disk" in failed
    assert "  1.2  2.0 GiB" in lines(ended)[4], "a dead rank spends no more time in its stage"


def test_many_ranks_are_grouped_and_a_silent_one_is_named():
    ranks = [
        RankStatus(i, f"n{i // 8:03}", "update of step 13", 12.5, "", 70 * 2**30)
        for i in range(128)
    ]
    ranks[77] = RankStatus(77, "n009", "old_logprob of step 13", 20.0, "", 2**30, silent=33.0)
    found = lines(replace(STATUS, ranks=ranks))
    assert found[3].split("  ")[0] == "rank" and len(found) == 6
    assert (
        " ".join(found[4].split())
        == "77 n009 old_logprob of step 13 54.0 1.0 GiB no heartbeat for 0:33"
    )
    assert (
        " ".join(found[5].split()) == "0 to 76, 78 to 127 16 hosts update of step 13 13.5 70.0 GiB"
    )
    assert len(lines(replace(STATUS, ranks=ranks), every_rank=True)) == 4 + 128


def test_once_and_what_is_no_run(tmp_path, capsys):
    (tmp_path / "status.json").write_text(
        json.dumps({"schema": SCHEMA, **asdict(replace(STATUS, time=NOW - 200))})
    )
    assert top.main([str(tmp_path)]) == 0, "no terminal: once, without escapes"
    shown = capsys.readouterr().out
    assert "no heartbeat" in shown and "\x1b" not in shown
    assert top.main([str(tmp_path / "nothing"), "--once"]) == 2
    assert "nothing/status.json: not found: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (401, {}, "answers 401"),
        (200, {}, "answers no load"),
        *(
            (200, {"weight_version": "1", "loads": loads}, "answers no load")
            for loads in (["text"], [None], 3, [{"memory": {"weight_gb": 1}}],
                          [{"num_running_reqs": "many"}], [{"num_waiting_reqs": float("inf")}],
                          [{"token_usage": None}])
        ),
    ],
)  # fmt: skip
def test_servers_that_answer_otherwise(status, body, problem):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *arguments):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert ask_load(f"http://127.0.0.1:{server.server_port}", {}).problem == problem
    finally:
        server.shutdown()
        server.server_close()
    assert "(InvalidURL)" in ask_load("http://host:port", {}).problem
    assert (
        "does not answer from here"
        in ask_load(f"http://127.0.0.1:{server.server_port}", {}).problem
    )


def test_a_folder_does_not_choose_which_secret_is_sent(tmp_path, monkeypatch, capsys):
    """status.json may be another person's: no variable that it names is sent to the servers that it
    names.
    """
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            received.append(self.headers.get("Authorization"))
            self.send_response(404)
            self.end_headers()

        def log_message(self, *arguments):
            return

    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        status = replace(
            STATUS, time=time.time(), servers=[f"http://127.0.0.1:{server.server_port}"]
        )
        row = {"schema": SCHEMA, **asdict(status), "api_key_env": "SOME_TOKEN"}
        (tmp_path / "status.json").write_text(json.dumps(row))
        assert top.main([str(tmp_path), "--once"]) == 0
        assert top.main([str(tmp_path), "--once", "--api-key-env", "SOME_TOKEN"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    assert received == [None, "Bearer secret"]
    assert top.main([str(tmp_path), "--api-key-env", "NO_TOKEN"]) == 2
    assert "--api-key-env NO_TOKEN: is unset or empty" in capsys.readouterr().err


def test_a_server_says_which_weights_it_has_or_gets():
    assert name_of("4@run-1") == "v4"
    assert name_of("updating to 5@run-1") == "to v5"


def test_what_ranks_say_is_no_markup():
    said = "KeyError: '[/INST]' from http://[fd00::b:1]:30000"
    status = replace(STATUS, ranks=[replace(RANKS[0], waits_for=said), RANKS[1]])
    loads = [Load("http://[fd00::b:1]:30000", "12", 812.4, 16, 3, 0.12, 1.2)]
    text = "\n".join(lines(status, loads, width=200))
    assert said.replace("http://", "") in text and "http://[fd00::b:1]:30000  " in text
