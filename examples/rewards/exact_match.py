"""A reward of your own: [reward] function = "examples.rewards.exact_match:exact_match".

Any importable function (prompt, response, label) -> finite number can be a reward.  It runs in
worker processes with a time-out.  An exception is counted, and the response gets reward.on_error
(default 0).
"""


def exact_match(prompt: str, response: str, label: str) -> float:
    """1.0 if the response is the label, up to surrounding white space."""
    return float(response.strip() == label.strip())
