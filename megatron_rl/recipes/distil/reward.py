"""The reward: 1 where the final answer equals the label, else 0.  config.toml names it.

Change it as you like: https://github.com/huggingface/Math-Verify compares numbers and formulas, so
that 0.5, 1/2 and \\boxed{\\frac{1}{2}} are equal.  It runs in worker processes with a time limit.
"""

from megatron_rl.reward import math_answer


def score(prompt: str, response: str, label: str) -> float:
    return math_answer.score(prompt, response, label)
