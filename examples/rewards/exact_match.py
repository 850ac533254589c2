"""A reward of your own: [reward] function = "examples.rewards.exact_match:exact_match".

Any importable function (prompt, response, label) -> finite number will do.  It runs in worker processes with a
time-out; what it raises is counted and scores 0.
"""


def exact_match(prompt: str, response: str, label: str) -> float:
    """1.0 if the response is the label, up to surrounding white space."""
    return float(response.strip() == label.strip())
