"""The tree of an episode in a real browser: its turns lead to their tokens and to other sequences;
its texts are shown and not run.
"""

import pytest

from tests.browser import TOKEN, open_browser, serve_runs, why_no_browser
from tests.viewer_episode import PROMPT, write_agent_run

REASON = why_no_browser()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")


@pytest.fixture
def page(tmp_path):
    """A page of the made-up run, on which no error may occur."""
    run, problems = write_agent_run(tmp_path / "agent"), []
    with serve_runs([run], tmp_path / "cache") as address, open_browser() as browser:
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.set_default_timeout(10_000)
        opened.goto(f"{address}/?token={TOKEN}")
        opened.on("console", lambda message: problems.append(message.text))
        opened.on("pageerror", lambda error: problems.append(f"{error}"))
        opened.goto(f"{address}/#/run/0/rollout/1/rollouts/Q0%2F0%2F0")
        opened.locator(".tokens .t").first.wait_for()
        yield opened
    assert not problems


def test_the_tree_of_an_episode(page):
    tree = page.locator(".episode")
    assert tree.locator("summary").first.inner_text() == "Episode 4 turns in 3 sequences"
    first = tree.locator(".tree > ol").first
    turns = first.locator("> li")
    assert [text.split(" ", 2)[:2] for text in turns.locator("> .turn").all_inner_texts()] == [
        ["turn", "1"],
        ["turn", "2"],
    ]
    second = turns.nth(1).inner_text()
    for text in ("10 tokens masked", "reward 0.25", "environment 0.5 s", "model 2.25 s", "tool 6"):
        assert text in second, text
    assert 'calculate(a=2, operator="*", b=3)' in turns.first.inner_text()
    assert "<script>window.HACKED = 1</script>" in second
    assert not tree.locator("script").count() and not page.evaluate("window.HACKED")
    # a turn leads to its first token, whose experts are shown; pointing elsewhere keeps it
    turns.first.locator("button").click()
    page.locator(f".t[data-place='{len(PROMPT)}'][aria-current]").wait_for()
    page.get_by_text(f"token {len(PROMPT)} of").wait_for()
    assert page.locator(".detail .routes tbody tr").count() > 0
    page.locator(".t[data-place='0']").hover()
    page.get_by_text(f"token {len(PROMPT)} of").wait_for()
    assert turns.first.get_attribute("aria-current") == "true"
    # the sequence that parts after the first turn is indented below it
    turns.first.locator("ol a").click()
    page.get_by_role("heading", name="Q0/0/1").wait_for()
    assert page.locator(".episode ol ol button").inner_text() == "turn 1"
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_response_of_one_turn_has_no_panel(page):
    page.goto(page.url.replace("Q0%2F0%2F0", "Q0%2F1"))
    page.get_by_role("heading", name="Q0/1").wait_for()
    assert page.locator(".episode").count() == 0
