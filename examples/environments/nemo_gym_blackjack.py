"""NeMo Gym's blackjack.  Its resources server answers in this process, without a port; another
environment of the package with `reset` and `step` is used in the same way.
"""

from __future__ import annotations

import json
import sys

from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient
from openai import OpenAI
from resources_servers.blackjack.app import BlackjackEnv


def main() -> None:
    json.loads(sys.stdin.readline())  # each hand is dealt at random
    client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
    config = BaseResourcesServerConfig(
        host="127.0.0.1", port=0, name="blackjack", entrypoint="app.py", domain="games"
    )
    server = BlackjackEnv(config=config, server_client=ServerClient.model_construct())
    with TestClient(server.setup_webserver()) as game:
        request: dict = {"input": []}
        state = game.post("/reset", json={"responses_create_params": request}).json()
        reward, turns, is_done = 0.0, 0, False
        while not is_done:
            request["input"].append({"role": "user", "content": state["observation"]})
            response = client.responses.create(model="policy", input=request["input"])
            answer = response.model_dump(mode="json")
            request["input"] += answer["output"]
            step = {"responses_create_params": request, "response": answer}
            state = game.post("/step", json=step).json()
            reward, turns = reward + state["reward"], turns + 1
            is_done = state["terminated"] or state["truncated"]
    print(json.dumps({"reward": reward, "metrics": {"turns": turns}}))


if __name__ == "__main__":
    main()
