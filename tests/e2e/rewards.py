"""A reward that a random model earns half of the time, so that groups have an advantage."""


def parity(prompt: str, response: str, label: str) -> float:
    return float(sum(map(ord, response)) % 2)
