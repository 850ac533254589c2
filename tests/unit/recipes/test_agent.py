"""The recipe agent: its program against an OpenAI endpoint, its reward, and bad input."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megatron_rl.config import load_config
from megatron_rl.plan.preflight import function_problems
from megatron_rl.recipes import new

FOLDER = new.recipes()["agent"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"agent_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is 42.", "42", 1.0),
        ("12 and 30 are 42", "42", 1.0),
        ("$1,250.00", "1250", 1.0),
        ("-3", "-3", 1.0),
        ("3", "-3", 0.0),
        ("42, no: 41", "42", 0.0),
        ("none", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_the_last_number_is_compared(response, label, reward):
    assert load("reward").score("", response, label) == reward


CALL = {"name": "calculate", "arguments": '{"a": 6, "operator": "*", "b": 7}'}
TURNS = [
    {"tool_calls": [{"id": "c1", "type": "function", "function": CALL}], "content": None},
    {"content": "It is 42."},
]


@pytest.mark.parametrize(("label", "reward"), [("42", 1.0), ("41", 0.0)])
def test_the_program_calls_its_tool_and_prints_its_reward(label, reward):
    """Started as agent.command starts it, with an endpoint that answers with TURNS."""
    asked = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", **TURNS[len(asked) - 1]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
            content = json.dumps(body | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments): ...

    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    env = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key"}
    command = load_config(FOLDER / "config.toml").agent.command
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=FOLDER, env=env, text=True, capture_output=True,
        input=json.dumps({"text": "6 * 7?", "label": label}) + "\n", timeout=120,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"reward": reward, "metrics": {"calls": 1}}
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][-1]["content"] == "42.0"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("forty-two", "must end with #### and the answer"),
        ("#### forty-two", "the answer must be a number, got 'forty-two'"),
        ("####", "the answer must be a number, got ''"),
    ],
)
def test_an_answer_that_is_no_number_is_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        load("prepare").convert({"question": "6 * 7?", "answer": answer})


def test_a_program_that_is_not_there_is_named_by_the_dry_run(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    cfg = load_config(FOLDER / "config.toml", ["--agent.command", "pythom", "agent.py"])
    assert [problem.partition(": ")[2] for problem in function_problems(cfg)] == [
        "'pythom' must be a program; it is not on PATH"
    ]
