"""Environments of other packages, unmodified, each in a Python environment of its own: `make
test-clients` makes them in the folder that OWN_ENVIRONMENTS names.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from examples.coding_agent.repositories import PATH, repositories
from megatron_rl.rollout.server.ports import free_port
from tests.fake_server import FakeServer
from tests.unit.rollout import test_endpoint
from tests.unit.rollout.test_endpoint import (
    PROMPT,
    answer,
    chat_sample,
    check_every_token_once,
    sample,
)

FOLDER = os.environ.get("OWN_ENVIRONMENTS", "")
PROGRAMS = Path("examples")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="OWN_ENVIRONMENTS names no folder: make test-clients"),
]


class Case(NamedTuple):
    program: str
    packages: tuple[str, ...]
    preload: tuple[str, ...]
    rewards: tuple[float, ...]
    """Rewards that the episode may have with the answers of `reply`."""
    turns: tuple[int, ...]
    python: str = "3.11"
    text: str = PROMPT.text
    label: str = PROMPT.label


REPOSITORY = repositories()[0]
CASES = {
    "textarena": Case(
        "environments/textarena_game.py", ("textarena==0.7.4", "openai==3.57.0"),
        ("textarena", "openai"), rewards=(1,), turns=(5,),
    ),
    "inspect": Case(
        "environments/inspect_task.py", ("inspect-ai==0.3.285", "openai==3.57.0"),
        ("inspect_ai.model", "openai"), rewards=(1,), turns=(2,),
    ),
    "nemo-gym": Case(
        "environments/nemo_gym_blackjack.py", ("nemo-gym==0.4.0",),
        ("nemo_gym.base_resources_server", "openai", "fastapi.testclient"),
        rewards=(-1, 0, 1), turns=(1,), python="3.12",
    ),
    "openai-agents": Case(
        "agents/framework_agent.py", ("openai-agents==0.24.0",),
        ("agents",), rewards=(1,), turns=(2,),
    ),
    "openenv": Case(
        "environments/openenv_client.py", ("openenv-core==0.3.0", "openai==3.57.0"),
        ("openenv.core", "openai"), rewards=(2,), turns=(3,),
    ),
    "mini-swe-agent": Case(
        "coding_agent/mini_swe.py", ("mini-swe-agent==2.4.6",),
        ("examples.coding_agent.mini_swe",), rewards=(1,), turns=(2,),
        text=REPOSITORY.task, label="0",
    ),
}  # fmt: skip
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Text(Observation):
    text: str

class Said(Action):
    text: str

class Count(Environment):
    def __init__(self):
        super().__init__()
        self.number = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = 0
        return Text(text="count", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        is_right, self.number = action.text == str(self.number), self.number + 1
        return Text(text="count on", done=self.number == 3, reward=float(is_right) - 1 / 3)
    @property
    def state(self):
        return State(step_count=self.number)

uvicorn.run(create_fastapi_app(Count, Said, Text), host="127.0.0.1", port=int(sys.argv[1]))
"""


def reply(conversation):
    """Return the fixed answer to a conversation, as the chat format writes it."""
    turn = conversation.count("<|im_start|>assistant") - 1
    if "[GAME]" in conversation:
        return f"[{GUESSES[turn]}]"
    if "You mend code." in conversation:
        fix = f"sed -i 's/{REPOSITORY.wrong}/{REPOSITORY.right}/' {PATH} && {SUBMIT}"
        call = {"name": "bash", "arguments": {"command": fix if turn else "python3 test.py"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if "<action>" in conversation:
        return "<action>stand</action>"
    return str(turn) if "count" in conversation else answer(conversation)


GUESSES = (3, 15, 12, 8, 10)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def python_of(name, case):
    """Return the Python of the case's environment, which is made where it is not there.

    Skips a case whose version of Python this machine does not have: none is downloaded.
    """
    folder = Path(FOLDER).resolve() / name
    if not (folder / "bin" / "python").exists():
        uv = Path(sys.executable).parent / "uv"
        wanted = ["--no-python-downloads", "--python", case.python]
        if subprocess.run([uv, "python", "find", "--quiet", *wanted[:1], case.python]).returncode:
            pytest.skip(f"{name} needs Python {case.python}, which this machine does not have")
        subprocess.run([uv, "venv", "--quiet", *wanted, folder], check=True)
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", folder, *case.packages], check=True
        )
    return str(folder / "bin" / "python")


@pytest.fixture
def openenv_server(monkeypatch):
    """A server of the environment Count, which runs in the environment of openenv."""
    port = free_port()
    with subprocess.Popen(
        [python_of("openenv", CASES["openenv"]), "-c", SERVER, str(port)]
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            limit = time.monotonic() + 60
            while time.monotonic() < limit:
                try:
                    if httpx.get(f"{url}/health").is_success:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            monkeypatch.setenv("OPENENV_URL", url)
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("is_forked", [False, True], ids=["started", "forked"])
@pytest.mark.parametrize("name", CASES)
def test_an_environment_runs_unmodified(request, monkeypatch, name, is_forked):
    case = CASES[name]
    monkeypatch.setattr(test_endpoint, "PROMPT", replace(PROMPT, text=case.text, label=case.label))
    if name == "openenv":
        request.getfixturevalue("openenv_server")

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, reply)

    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(
            server,
            max_tokens=4000,
            longest=6000,
            command=(python_of(name, case), str(PROGRAMS / case.program)),
            preload=case.preload if is_forked else (),
        )
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1
    assert rollout.episode.reward in case.rewards and rollout.num_spans in case.turns
