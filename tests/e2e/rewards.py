"""Rewards that tell the responses of a random model apart, so that groups have an advantage."""


def parity(prompt: str, response: str, label: str) -> float:
    return float(sum(map(ord, response)) % 2)


def mean_code(prompt: str, response: str, label: str) -> float:
    """Two different responses seldom have the same."""
    return sum(map(ord, response)) / (100 * max(len(response), 1))
