"""An OpenEnv environment, whose server OPENENV_URL names.  Its observations and actions have a text
in the fields OBSERVATION and ACTION.
"""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI
from openenv.core import GenericEnvClient

OBSERVATION, ACTION, MAX_TURNS = "text", "text", 16


def main() -> None:
    question = json.loads(sys.stdin.readline())
    client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
    messages: list = []
    reward, turns = 0.0, 0
    with GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync() as environment:
        result = environment.reset(episode_id=question["id"])
        while not result.done and turns < MAX_TURNS:
            messages.append({"role": "user", "content": result.observation[OBSERVATION]})
            answer = client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            result = environment.step({ACTION: message.content or ""})
            reward += result.reward or 0.0
            turns += 1
    print(json.dumps({"reward": reward, "metrics": {"turns": turns}}))


if __name__ == "__main__":
    main()
