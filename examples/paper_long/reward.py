"""The reward of a written-out sum: rule-based, and only for the end."""


def ledger(prompt: str, response: str, label: str) -> float:
    """1.0 if there is one "=" after the items and exactly the label follows it; the items
    themselves are not looked at.
    """
    items, _, answer = response.strip().partition("=")
    return float(bool(items) and answer == label)
