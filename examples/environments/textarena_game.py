"""A game of TextArena for one player.  The seed of the game is the hash of the prompt's id."""

from __future__ import annotations

import json
import sys
import zlib

import textarena
from openai import OpenAI

GAME = "GuessTheNumber-v0"


def main() -> None:
    question = json.loads(sys.stdin.readline())
    client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
    game = textarena.make(GAME)
    game.reset(num_players=1, seed=zlib.crc32(question["id"].encode()))
    messages: list = []
    is_done, turns = False, 0
    while not is_done:
        _, observed = game.get_observation()
        messages.append({"role": "user", "content": observed})
        answer = client.chat.completions.create(model="policy", messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        is_done, _ = game.step(message.content or "")
        turns += 1
    rewards, _ = game.close()
    print(json.dumps({"reward": rewards[0], "metrics": {"turns": turns}}))


if __name__ == "__main__":
    main()
