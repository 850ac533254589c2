"""Random conversations with the endpoint: every token that a client read is learned from once."""

from array import array
from collections import Counter

from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.chat import Chat
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


class Window(array):
    """Tokens of a sequence, with all tokens before their end."""

    whole: array


def test_a_format_reads_and_continues_a_window_as_the_whole_history(monkeypatch):
    """A turn is read, and continued, from the tokens that its format wrote after the turn before
    (Input.window): in each format the reply and the new tokens are those of the whole history.
    """
    windows, wrong = Counter(), []

    def span(branch, start, end=None):
        window = Window("q", branch._tokens[start:end])
        window.whole = branch._tokens[:end]
        return window

    def compared(name):
        method = getattr(Chat, name)

        def call(chat, prompt, *args, **kwargs):
            answer = method(chat, prompt, *args, **kwargs)
            if isinstance(prompt, Window) and len(prompt) < len(prompt.whole):
                windows[chat.name] += 1
                if method(chat, prompt.whole, *args, **kwargs) != answer:
                    wrong.append((chat.name, name))
            return answer

        return call

    monkeypatch.setattr(Branch, "span", span)
    for name in ("parse", "continuation"):
        monkeypatch.setattr(Chat, name, compared(name))
    _, violations = run(8 * len(FORMATS), seed=50)
    assert not wrong and not violations, (wrong[:5], violations[:5])
    assert set(windows) == set(FORMATS), windows
