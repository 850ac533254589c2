"""mini-swe-agent 2.4.6, unmodified, in a Python environment of its own; its commands run in the
sandbox.

    agent.command = [".venv-mini/bin/python", "examples/coding_agent/mini_swe.py"]
    agent.preload = ["examples.coding_agent.mini_swe"]     # imported once, each episode is forked
    agent.renderer = "qwen3"
    data.chat_template = false     # mini-swe-agent writes the messages
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from examples.coding_agent.repositories import passed_frac, repositories
from megatron_rl.reward.sandbox.box import find_box
from megatron_rl.reward.sandbox.workspace import Workspace, WorkspaceError

SYSTEM = "You mend code."
MAX_TURNS = 4
find_box()  # tries the walls, once for all forks


class SandboxEnvironment(LocalEnvironment):
    """An environment of mini-swe-agent whose commands run in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.workspace = workspace

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        try:
            ended = self.workspace.run(action.get("command", ""))
        except WorkspaceError as error:
            return {"output": "", "returncode": -1, "exception_info": str(error)}
        late = f"stopped after {self.workspace.seconds:g} s" if ended.is_late else ""
        result = {"output": ended.output, "returncode": ended.status, "exception_info": late}
        self._check_finished(result)
        return result


def main() -> None:
    question = json.loads(sys.stdin.readline())
    repository = repositories()[int(question["label"])]
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
        cost_tracking="ignore_errors",
    )
    with Workspace(repository.files) as workspace:
        agent = DefaultAgent(
            model,
            SandboxEnvironment(workspace),
            system_template=SYSTEM,
            instance_template="{{task}}",
            step_limit=MAX_TURNS,
        )
        ended = agent.run(question["text"])
        passed = passed_frac(repository, workspace)
    metrics = {
        "commands": agent.n_calls,
        "submitted": float(ended.get("exit_status") == "Submitted"),
        "solved": float(passed == 1.0),
    }
    print(json.dumps({"reward": passed, "metrics": metrics}))


if __name__ == "__main__":
    main()
