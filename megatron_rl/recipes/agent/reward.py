"""The reward: 1 where the last number of the final answer equals the label, else 0.

agent.py asks it for every episode and prints what it returns.
"""

import re
from decimal import Decimal

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: str, response: str, label: str) -> float:
    numbers = [Decimal(text.replace(",", "")) for text in NUMBER.findall(response)]
    return float(bool(numbers) and numbers[-1] == Decimal(label))
