"""Random conversations with the endpoint: every token that a client read is learned from once."""

from tests.conversations.__main__ import run
from tests.conversations.model import FORMATS


def test_what_clients_read_is_learned_from_once_as_it_was_sampled():
    num = 10 * len(FORMATS)
    counts, wrong = run(num, seed=0)
    assert not wrong, wrong[:5]
    # most turns continue a sequence
    assert counts["turns that were read"] > 1.2 * counts["sequences"] and counts["hang_up"] > 10
    assert counts["streams cut before they were written"] > 0
    assert all(counts[f"requests of {door}"] for door in ("completions", "messages", "responses"))
