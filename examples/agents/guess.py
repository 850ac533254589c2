"""A small game: the model answers the question, and after a wrong number hears whether the right
one is larger ("+") or not ("="), and the question again.

    agent.environment = "examples.agents.guess:Guess"
"""

from __future__ import annotations

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Step, Turn


class Guess:
    def reset(self, prompt: Prompt) -> None:
        self.question, self.number, self.guesses = prompt.text, int(prompt.label), 0

    def step(self, turn: Turn) -> Step:
        self.guesses += 1
        text = turn.text.strip()
        if not text.isdecimal():
            return Step(done=True, metrics={"guesses": self.guesses, "numbers": 0.0})
        metrics = {"guesses": self.guesses, "numbers": 1.0}
        if int(text) == self.number:
            return Step(reward=1.0 / self.guesses, done=True, metrics=metrics)
        return Step(f"{'+' if int(text) < self.number else '='}{self.question}", metrics=metrics)
