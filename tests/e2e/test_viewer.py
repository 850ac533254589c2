"""The viewer's pages in a real browser, on made-up runs (tests/viewer_run.py): one browser and one
server for all tests.
"""

import json
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from megatron_rl_viewer.app import STATIC
from megatron_rl_viewer.index import Index
from megatron_rl_viewer.index_rows import prompt_key
from tests import viewer_run
from tests.browser import TOKEN, open_browser, serve_runs, why_no_browser

REASON = why_no_browser()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")
DEMO, DAMAGED, LIVE, MANY, SHARE, OTHER = range(6)
KEY = "6/rollouts/Q1%2F1"
LONG_KEY = "1/rollouts/Q9%2F0"
LONG = 32_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    demo = viewer_run.write_run(root / "demo", steps=6)
    damaged = viewer_run.write_run(root / "damaged", steps=3, tokenizer=False)
    with open(damaged / "rollouts.jsonl", "a") as file:
        file.write('{"step": 3, "id": "cut')
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write("no json\n")
    (damaged / "trained_000003.safetensors").write_bytes(b"\x08" * 40)
    live = root / "live"
    live.mkdir()
    viewer_run.write_config(live, 100)
    for step in (1, 2, 3):
        viewer_run.add_step(live, step)
    share = viewer_run.write_run(root / "share", steps=1, tensors=False)
    config = (share / "config.toml").read_text()
    (share / "config.toml").write_text(
        config.replace("save_tensors = false", "save_tensors = 0.05")
    )
    other = root / "other"  # has one prompt of the demo's step 3 at its steps 2 and 5
    other.mkdir()
    viewer_run.write_config(other, 5)
    for step in (2, 5):
        lines = [
            viewer_run.make_rollout(3, f"Q0/{k}", "trained", "rollouts")[0]
            | {"step": step, "reward": 1.0 if k else 0.25}
            for k in range(3)
        ]
        viewer_run.append(other / "rollouts.jsonl", lines)
    many = viewer_run.write_many(root / "many", 5_000)
    return [demo, damaged, live, many, share, other]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    with serve_runs(folders, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture(scope="module")
def context(browser, address):
    """A browser session that has opened the URL with the token once."""
    opened = browser.new_context(viewport={"width": 1280, "height": 800})
    page = opened.new_page()
    page.goto(f"{address}/?token={TOKEN}")
    assert "token" not in page.url
    page.close()
    opened.set_default_timeout(10_000)
    yield opened
    opened.close()


@pytest.fixture
def page(context):
    """A page on which no error may occur: none in the console, no failed request, nothing that the
    CSP refused.
    """
    opened = context.new_page()
    problems: list[str] = []
    opened.on(
        "console",
        lambda message: (
            problems.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    opened.on("pageerror", lambda error: problems.append(f"{error}"))
    opened.on(
        "response",
        lambda response: (
            problems.append(f"{response.status} {response.url}") if response.status >= 400 else None
        ),
    )
    yield opened
    opened.close()
    assert not problems


def rows(page) -> list[str]:
    return page.locator(".tbody .tr").all_inner_texts()


def cells(page, column: str) -> list[str]:
    place = page.locator(".thead .th").all_inner_texts()
    place = next(
        number for number, text in enumerate(place) if text.strip().split(" ")[0] == column
    )
    return page.locator(f".tbody .tr .td:nth-child({place + 1})").all_inner_texts()


def wait_for(page, condition, what: str, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        page.wait_for_timeout(20)


# Every page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_pages_load_and_fit(page, address, mode, width):
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=mode)
    shown = {
        "#/run/0": ".chart canvas",
        "#/compare?runs=0,2&smooth=0.5": ".chart canvas",
        f"#/compare?runs={DEMO},{OTHER}&prompt={prompt_key('10+3=')}": ".prompt-steps .member",
        "#/run/0/rollouts": ".tbody .td",
        "#/run/0/rollouts?by=group": ".tbody .td",
        f"#/run/0/rollout/{KEY}": ".t",
        "#/run/0/experts?map=difference": ".heat canvas",
    }
    for link, part in shown.items():
        page.goto(f"{address}/{link}")
        if part == ".chart canvas":  # below the story, and drawn when it is in sight
            page.locator(".events tbody").wait_for()
            page.locator(".charts > *").first.scroll_into_view_if_needed()
        page.locator(part).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{link} is wider than {width} pixels"
        )
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if mode == "light" else "rgb(20, 22, 26)")


def test_the_switch_of_colours_is_kept(page, address):
    page.goto(f"{address}/#/run/0")
    page.get_by_label("Colours").select_option("dark")
    page.reload()
    page.get_by_label("Colours").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    page.get_by_label("Colours").select_option("auto")


def test_every_control_has_a_name(page, address):
    for link in ("#/run/0", "#/run/0/rollouts", f"#/run/0/rollout/{KEY}", "#/run/0/experts"):
        page.goto(f"{address}/{link}")
        page.locator("h1").wait_for()
        page.wait_for_timeout(150)
        unnamed = page.evaluate(
            """[...document.querySelectorAll('button, input, select, a, canvas, [role=img], svg')]
            .filter(e => !e.closest('.u-wrap'))
            .filter(e => !(e.ariaLabel || e.innerText?.trim() || e.labels?.length || e.title))
            .map(e => e.outerHTML)"""
        )
        assert not unnamed, link


def test_access_without_the_token_is_refused(browser, address):
    stranger = browser.new_context()
    page = stranger.new_page()
    for path in ("/", "/static/app.js", "/api/runs", "/?token=wrong"):
        assert page.goto(f"{address}{path}").status == 401
    stranger.close()


# Run ----------------------------------------------------------------------------------------------


def test_curves_zoom_smooth_and_search(page, address):
    page.goto(f"{address}/#/run/0")
    plot = page.locator("[data-metric='rollout/reward_mean'] .u-over")
    page.locator(".events tbody").wait_for()  # above the curves: it moves them
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], y, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="All steps (now 2 to 4)").click()
    page.get_by_label("Smoothing").fill("0.9")
    wait_for(page, lambda: "smooth=0.9" in page.url, "smoothing is not in the URL")
    assert "first 0.4, last 0.9, from 0.4 to 0.9" in page.locator(
        "[data-metric='rollout/reward_mean'] [role=img]"
    ).get_attribute("aria-label")
    page.get_by_label("Metrics").fill("grad norm")
    wait_for(page, lambda: page.locator(".chart").count() == 1, "the search leaves one chart")
    assert page.locator(".chart").get_attribute("data-metric") == "optim/grad_norm"
    assert page.locator(".chart figcaption").inner_text().startswith("gradient norm")


def test_runs_are_compared(page, address):
    page.goto(f"{address}/#/compare?runs=0,2")
    label = page.locator("[data-metric='rollout/reward_mean'] [role=img]")
    wait_for(
        page,
        lambda: label.count() and "live: first" in label.get_attribute("aria-label"),
        "two runs in one chart",
    )
    page.get_by_text("run.num_steps").wait_for()  # differs
    table = page.locator(".events tbody")
    for name, run in (("demo", 0), ("live", 2)):
        events = page.request.get(f"{address}/api/runs/{run}/events").json()
        expected = sum(event["kind"] == "weight_sync" for event in events)
        rows = table.locator("tr", has_text="weight sync").filter(
            has=page.locator("td", has_text=name)
        )
        wait_for(
            page,
            lambda rows=rows, expected=expected: rows.count() == expected > 0,
            f"the events of {name}",
        )


def test_one_prompt_in_two_runs(page, address):
    """From the list of the compare page to the prompt, and to a response."""
    page.goto(f"{address}/#/compare?runs={DEMO},{OTHER}")
    table = page.locator("table.prompts")
    table.locator("a").first.wait_for()
    assert table.locator("tbody tr").count() == 1
    table.locator("a").click()
    steps = page.locator(".prompt-steps")
    steps.wait_for()
    assert page.locator("pre.prompt").inner_text() == "10+3="
    key = parse_qs(page.url.partition("?")[2])["prompt"][0]
    expected = {}
    for column, run in enumerate((DEMO, OTHER)):
        answer = page.request.get(f"{address}/api/runs/{run}/prompt?key={key}").json()
        for group in answer["groups"]:
            expected[group["step"], column] = len(group["responses"])
    assert expected == {(2, 1): 3, (3, 0): viewer_run.GROUP, (5, 1): 3}
    found = {}
    for row in steps.locator("tbody tr").all():
        for column, cell in enumerate(row.locator("td").all()):
            if count := cell.locator(".member").count():
                found[int(row.locator("th").inner_text()), column] = count
    assert found == expected
    assert steps.locator("tbody tr").first.locator(".latest").inner_text() == "0.75"
    texts = steps.locator("tbody tr").first.locator("details")
    texts.locator("summary").click()
    assert "<script>alert(0)</script>" in texts.inner_text() and not steps.locator("script").count()
    steps.locator(".member").last.click()
    page.get_by_role("heading", name="Q0/2").wait_for()
    assert f"/run/{OTHER}/rollout/5/" in page.url


@pytest.mark.parametrize("link", ["rollouts?f.group=5/rollouts/Q0", "rollout/5/rollouts/Q0%2F1"])
def test_from_a_group_to_its_prompt_in_all_runs(context, address, link):
    """The server answers 404 for the runs that lack it, and the page says so."""
    page = context.new_page()
    page.goto(f"{address}/#/run/{OTHER}/{link}")
    page.get_by_role("link", name="this prompt in all 6 runs").click()
    page.locator(".prompt-steps .member").first.wait_for()
    key = prompt_key("10+3=")
    assert parse_qs(page.url.partition("?")[2])["prompt"] == [key]
    heads = page.locator(".prompt-steps thead th").all_inner_texts()
    lacks = {text.partition(":")[0].strip() for text in heads if f"no prompt {key}" in text}
    assert lacks == {"many", "share"} and len(heads) == 7
    page.close()


def test_a_run_that_is_being_written(page, address, folders):
    page.goto(f"{address}/#/run/{LIVE}")
    page.get_by_text("step 3 of 100").wait_for()
    page.locator("[data-metric='rollout/reward_mean']").wait_for()
    viewer_run.add_step(folders[LIVE], 4)
    page.get_by_text("step 4 of 100").wait_for(timeout=60_000)
    wait_for(
        page,
        lambda: page.locator("[data-metric='rollout/reward_mean'] .latest").inner_text() == "0.7",
        "the new value",
    )
    page.get_by_text("weights of version 4").wait_for()


def test_a_damaged_run_names_its_files(page, address):
    page.goto(f"{address}/#/run/{DAMAGED}")
    page.get_by_text("metrics.jsonl:4").first.wait_for()
    page.locator("[data-metric='rollout/reward_mean']").wait_for()
    page.goto(f"{address}/#/run/{DAMAGED}/rollout/3/rollouts/Q0%2F0?color=log_mu")
    page.locator(".warnings").get_by_text("trained_000003.safetensors").first.wait_for()
    page.locator(".model .t").first.wait_for()  # what is readable is shown: token ids and log mu


def test_a_response_without_tokens_is_no_damage(page, address):
    """rollout.save_tensors = 0.05, as in the demo: in grey, without a warning; the texts are
    shown.
    """
    page.goto(f"{address}/#/run/{SHARE}/rollout/1/rollouts/Q0%2F0")
    page.locator(".note").get_by_text(
        "did not save the tokens of this response (rollout.save_tensors = 0.05)"
    ).wait_for()
    page.locator(".span.model .text").wait_for()
    assert page.locator(".warnings").count() == 0


def test_pages_say_that_a_run_is_indexed(browser, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(Index, "update", lambda self, stop=None: None)  # not read yet
    with serve_runs(folders[:1], tmp_path) as address:
        page = browser.new_page()
        page.goto(f"{address}/?token={TOKEN}")
        page.goto(f"{address}/#/run/0/experts")
        page.locator(".note").get_by_text("this run is being indexed (0%)").wait_for()
        page.locator("header").get_by_text("indexing: 0 %").wait_for()
        assert page.locator(".warnings").count() == 0 and page.get_by_text("MoE layer").count() == 0
        page.close()


# Rollouts -----------------------------------------------------------------------------------------


def test_the_table_sorts_filters_and_searches(page, address):
    page.goto(f"{address}/#/run/0/rollouts")
    page.get_by_text("96 responses").wait_for()
    page.get_by_role("button", name="tokens").click()
    wait_for(page, lambda: "sort=length" in page.url, "sorting is in the URL")
    wait_for(
        page,
        lambda: (
            (lengths := [int(text) for text in cells(page, "tokens")])
            and lengths == sorted(lengths)[::-1]
        ),
        "sorted",
    )
    page.get_by_label("Filter step").fill("2..3")
    page.get_by_text("32 responses").wait_for()
    assert set(cells(page, "step")) <= {"2", "3"}
    page.get_by_label("Filter reward").fill("many")
    assert page.get_by_label("Filter reward").get_attribute("aria-invalid") == "true"
    page.get_by_label("Filter reward").fill("> 0.5")
    wait_for(page, lambda: set(cells(page, "reward")) == {"1"}, "filtered by reward")
    shared = page.url
    before = page.get_by_role("status").first.inner_text()
    other = page.context.new_page()
    other.goto(shared)
    other.get_by_text(before).wait_for()
    assert rows(other) == rows(page), "a link shows the same rows"
    other.close()
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Search prompts and responses").fill("10+4=")
    page.get_by_text("4 responses").wait_for()


def test_a_group_lists_its_responses(page, address):
    page.goto(f"{address}/#/run/0/rollouts?by=group")
    page.get_by_text("24 groups").wait_for()
    page.locator(".tbody a").first.click()
    page.get_by_text("of the group 6/rollouts/Q").wait_for()
    page.get_by_text("4 responses").wait_for()


def test_the_keyboard_opens_a_row(page, address):
    page.goto(f"{address}/#/run/0/rollouts")
    page.locator(".tbody a").first.wait_for()
    page.locator(".vtable").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    assert (
        page.evaluate("document.activeElement.dataset.place") == "1"
        or page.evaluate("document.activeElement.dataset.place") == "0"
    )
    page.keyboard.press("End")
    wait_for(
        page, lambda: page.evaluate("document.activeElement.dataset.place") == "95", "the last row"
    )
    page.keyboard.press("Enter")
    page.locator(".tokens").wait_for()


def check_many(page, address, run: int, total: int) -> dict[str, float]:
    """Seconds to the first rows, and of a filter; scrolls to the middle and to the end."""
    page.goto("about:blank")
    start = time.monotonic()
    page.goto(f"{address}/#/run/{run}/rollouts")
    page.locator(".tbody a").first.wait_for()
    seconds = {"first paint": time.monotonic() - start}
    page.get_by_text(f"{total:,} responses").wait_for()
    start = time.monotonic()
    page.get_by_label("Filter reward").fill("> 0.9")
    wait_for(
        page,
        lambda: f"{total:,} responses" not in page.locator(".controls").inner_text(),
        "filtered",
    )
    seconds["filter"] = time.monotonic() - start
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_text(f"{total:,} responses").wait_for()
    page.locator(".vtable").evaluate("e => { e.scrollTop = e.scrollHeight / 2; }")
    wait_for(page, lambda: any(text.strip() for text in cells(page, "id")), "rows in the middle")
    page.locator(".vtable").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    wait_for(page, lambda: cells(page, "step")[-1:] == ["1"], "the last row")
    assert page.locator(".tbody .tr").count() < 60, "only rows in view exist"
    return seconds


def test_five_thousand_rollouts(page, address):
    wait_for(
        page,
        lambda: (
            page.request.get(f"{address}/api/runs/{MANY}/rollouts?limit=1").json()["total"] == 5000
        ),
        "indexed",
        60,
    )
    seconds = check_many(page, address, MANY, 5_000)
    # generous: a busy machine is not a defect
    assert seconds["first paint"] < 20 and seconds["filter"] < 10, seconds


def test_a_million_rows(page, address):
    """34 million pixels, more than the largest element of some browsers: the list is scaled, and
    every row can be reached.
    """
    total = 1_000_000
    columns = [{"name": "step", "label": "step", "kind": "number"}]

    def answer(route):
        arguments = parse_qs(urlsplit(route.request.url).query)
        first = int(arguments["offset"][0])
        shown = [
            {"step": number, "key": f"{number}/rollouts/Q"}
            for number in range(first, min(total, first + 100))
        ]
        route.fulfill(json={"total": total, "columns": columns, "rows": shown})

    page.route("**/api/runs/0/rollouts?**", answer)
    page.goto(f"{address}/#/run/0/rollouts")
    page.get_by_text("1,000,000 responses").wait_for()
    table, shown = (
        page.locator(".vtable"),
        lambda: [text.replace(",", "") for text in cells(page, "step")],
    )
    table.evaluate("e => { e.scrollTop = e.scrollHeight; }")
    wait_for(page, lambda: shown()[-1] == "999999", "the last row after a drag to the end")
    assert page.locator(".tbody .tr").last.evaluate(
        "e => e.getBoundingClientRect().bottom <="
        " e.closest('.vtable').getBoundingClientRect().bottom + 1"
    )
    table.evaluate("e => { e.scrollTop = e.scrollHeight / 2; }")

    def first() -> int | None:
        """The first row's number, once all rows in view are there."""
        texts = shown()
        return int(texts[0]) if all(text.isdigit() for text in texts) else None

    wait_for(page, lambda: abs((first() or 0) - 500_000) < 100, "the middle")
    page.wait_for_timeout(100)  # rows are read a moment after the last move
    before = first()
    table.evaluate("e => { e.scrollTop += 340; }")
    wait_for(page, lambda: first() == before + 10, "340 pixels are 10 rows")


@pytest.mark.slow
def test_a_hundred_thousand_rollouts(browser, tmp_path):
    folder = viewer_run.write_many(tmp_path / "large", 100_000)
    with serve_runs([folder], tmp_path / "cache") as address:
        session = browser.new_context(viewport={"width": 1280, "height": 800})
        page = session.new_page()
        page.goto(f"{address}/?token={TOKEN}")

        def is_indexed() -> bool:
            found = page.request.get(f"{address}/api/runs/0/rollouts?limit=1").json()
            return found["total"] == 100_000 and found["indexing"] is None

        wait_for(page, is_indexed, "indexed", 300)
        seconds = check_many(page, address, 0, 100_000)
        session.close()
    print(seconds)
    assert seconds["first paint"] <= 2 and seconds["filter"] <= 0.3, seconds


# One rollout --------------------------------------------------------------------------------------


def rollout_with_flips(page, address) -> tuple[str, dict]:
    """(key, answer) of an episode of two turns with a flip at a sampled token."""
    for step in range(1, 7):
        for prompt in range(viewer_run.PROMPTS):
            key = f"{step}/rollouts/Q{prompt}%2F1"
            answer = page.request.get(f"{address}/api/runs/0/rollout/{key}").json()
            if any(answer["values"]["flips"][answer["meta"]["prompt_length"] :]):
                return key, answer
    raise AssertionError("no flips in the made-up run")


def test_tokens_are_coloured_and_read_by_mouse_and_keys(page, address):
    key, answer = rollout_with_flips(page, address)
    page.goto(f"{address}/#/run/0/rollout/{key}")
    page.locator(".model .t").first.wait_for()
    for quantity, scale in {
        "log_mu": "sequential",
        "ratio": "diverging",
        "clipped": "category",
        "version": "category",
        "flips": "sequential",
    }.items():
        page.get_by_label("Colour by").select_option(quantity)
        wait_for(
            page,
            lambda scale=scale: scale in page.locator(".model .t").first.get_attribute("class"),
            quantity,
        )
        assert page.locator(".legend .swatch").count() >= 1 and f"color={quantity}" in page.url
    spans = {token["span"] for token in answer["tokens"]}
    assert spans == {"prompt", "model", "environment"}
    assert {text.split(" ")[0] for text in page.locator(".span h3").all_inner_texts()} == spans
    place = (
        next(number for number, value in enumerate(answer["values"]["log_mu"]) if value is not None)
        + 1
    )
    page.locator(f"[data-place='{place}']").hover()
    detail = page.locator(".detail")
    detail.get_by_text(f"token {place} of {len(answer['tokens'])}").wait_for()
    assert f"{answer['values']['log_mu'][place]:.4f}"[:6] in detail.inner_text()
    assert detail.locator(".routes tbody tr").count() == answer["routes"]["layers"]
    page.keyboard.press("ArrowRight")
    detail.get_by_text(f"token {place + 1} of").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    flips = answer["values"]["flips"]
    flipped = next(number for number in range(place - 1, len(flips)) if flips[number])
    detail.get_by_text(f"token {flipped} of").wait_for()
    assert detail.locator("tr.flipped").count() == flips[flipped]
    assert detail.locator("tr.flipped u").count() == 2 * flips[flipped], (
        "the expert of each engine that the other has not"
    )
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    wait_for(page, lambda: "%2F2" in page.url, "the next response of the group")


def test_responses_side_by_side_and_where_they_part(page, address):
    page.goto(f"{address}/#/run/0/rollout/{KEY}")
    page.get_by_role("button", name="Compare").click()
    page.locator(".member").first.click()
    page.locator(".response").nth(1).wait_for()
    first, second = (
        json.loads(page.request.get(f"{address}/api/runs/0/rollout/6/rollouts/Q1%2F{k}").text())[
            "tokens"
        ]
        for k in (1, 0)
    )
    start = next(number for number, token in enumerate(first) if token["span"] != "prompt")
    parting = next(
        number for number in range(start, len(first)) if first[number]["id"] != second[number]["id"]
    )
    marked = page.locator(".t.parting")
    assert [marked.nth(number).get_attribute("data-place") for number in range(marked.count())] == [
        f"{parting}"
    ] * 2


def test_text_of_a_model_is_shown_and_not_run(page, address):
    page.goto(f"{address}/#/run/{MANY}/rollouts")
    page.goto(f"{address}/#/run/0/rollouts")
    page.get_by_text("<script>alert(").first.wait_for()
    hostile = [
        {"text": text, "id": n, "span": "model", "place": n} for n, text in enumerate(HOSTILE)
    ]
    answer = {
        "meta": {"id": HOSTILE[0]},
        "group": [],
        "tokens": hostile,
        "values": {},
        "routes": None,
        "missing": [HOSTILE[1]],
    }
    page.route("**/api/runs/0/rollout/**", lambda route: route.fulfill(json=answer))
    page.goto(f"{address}/#/run/0/rollout/1/rollouts/hostile")
    page.locator(".t").first.wait_for()
    assert page.locator(".t").all_inner_texts() == HOSTILE
    assert not page.locator("#app img, #app script, #app iframe").count() and not page.evaluate(
        "window.HACKED"
    )


HOSTILE = [
    "<script>window.HACKED = 1</script>",
    "<img src=x onerror='window.HACKED = 1'>",
    "<iframe src=javascript:alert(1)></iframe>",
]


def test_a_page_that_fails_says_why(page, address):
    flips = {"dtype": "float64", "shape": [1, 1], "data": ""}
    routes = {
        "layers": 1,
        "top_k": 1,
        "server": None,
        "trainer": None,
        "flips": flips,
        "margin": None,
    }
    token = {"text": "a", "id": 1, "span": "model", "place": 0}
    answer = {
        "meta": {"id": "of a newer version"},
        "group": [],
        "tokens": [token],
        "values": {},
        "routes": routes,
        "missing": [],
    }
    page.route("**/api/runs/0/rollout/**", lambda route: route.fulfill(json=answer))
    page.goto(f"{address}/#/run/0/rollout/1/rollouts/new")
    page.get_by_role("alert").get_by_text("this page failed: an array of float64").wait_for()
    page.get_by_role("link", name="Experts").click()
    page.locator(".heat canvas").first.wait_for()


def test_a_response_of_32000_tokens(page, address):
    tokens = [
        {
            "text": f" w{n % 97}" if n % 31 else ".\n",
            "id": n % 97,
            "span": "model" if n > 9 else "prompt",
            "place": n,
        }
        for n in range(LONG)
    ]
    values = {
        "log_mu": [None] * 10 + [-(n % 7) / 2 for n in range(10, LONG)],
        "entropy": [None] * 10 + [n % 5 for n in range(10, LONG)],
    }
    answer = {
        "meta": {"id": "long"},
        "group": [],
        "tokens": tokens,
        "values": values,
        "routes": None,
        "missing": [],
    }
    page.route("**/api/runs/0/rollout/**", lambda route: route.fulfill(json=answer))
    page.goto(f"{address}/#/run/0/rollout/{LONG_KEY}")
    page.locator(".t").first.wait_for()
    assert page.locator(".t").count() < 8000, "tokens far from the screen are plain text"
    assert page.locator(".model .text").inner_text().count("w") > 25_000, (
        "and all of it is there to find"
    )
    start = time.monotonic()
    page.get_by_label("Colour by").select_option("entropy")
    wait_for(page, lambda: page.locator("[data-place='14'].sequential-8").count() == 1, "coloured")
    assert time.monotonic() - start < 20
    page.keyboard.press("End")
    page.locator(f"[data-place='{LONG - 1}'][aria-current]").wait_for()
    page.get_by_text(f"token {LONG - 1} of {LONG}").wait_for()


# Experts, export ----------------------------------------------------------------------------------


def test_experts(page, address):
    page.goto(f"{address}/#/run/0/experts?step=1:6")
    heat = page.locator(".heat canvas").first
    heat.wait_for()
    assert f"{viewer_run.LAYERS} layers by {viewer_run.EXPERTS} experts" in heat.get_attribute(
        "aria-label"
    )
    heat.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.get_by_text("layer 1, expert 0:").wait_for()
    answer = json.loads(page.request.get(f"{address}/api/runs/0/experts?step=1:6").text())
    assert page.locator(".swaps tbody tr").count() == len(answer["swaps"])
    page.get_by_role("button", name="trainer - server").click()
    wait_for(page, lambda: "map=difference" in page.url, "the map is in the URL")


def test_the_load_of_an_expert_over_the_steps(page, address):
    page.goto(f"{address}/#/run/0/experts?step=1:6")
    heat = page.locator(".heat canvas").first
    heat.wait_for()
    heat.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    curve = page.locator(".load-curve [role=img]")
    curve.wait_for()
    answer = page.request.get(f"{address}/api/runs/0/expert?layer=1&expert=1").json()
    assert len(answer["steps"]) == 6 and "expert=1.1" in page.url
    label = curve.get_attribute("aria-label")
    assert (
        "load of expert 1 in layer 1" in label
        and "server: first" in label
        and "trainer: first" in label
    )
    page.get_by_role("button", name="Close the curve").click()
    wait_for(page, lambda: not curve.count() and "expert=" not in page.url, "closed")
    heat.click(position={"x": 60, "y": 10})
    curve.wait_for()


def test_an_export_opens_from_disk(browser, folders, tmp_path):
    from megatron_rl_viewer.disk_copy import write_copy
    from megatron_rl_viewer.run_folder import Runs

    index = write_copy(
        Runs(folders[:1], tmp_path / "cache"),
        tmp_path / "export",
        STATIC,
        keys=[KEY, "6/rollouts/Q1%2F2", "5/rollouts/Q0%2F0"],
    )
    session = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    page = session.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(f"{error}"))
    page.goto(f"file://{index}")
    page.locator(".chart canvas").first.wait_for()
    page.goto(f"file://{index}#/run/0/rollouts")
    page.get_by_text("3 responses").wait_for()
    page.get_by_label("Filter step").fill("= 5")
    page.get_by_text("1 response").wait_for()
    page.goto(f"file://{index}#/run/0/rollout/{KEY}")
    page.locator(".model .t").first.wait_for()
    assert page.locator(".member").count() == 2, "of the group only what was exported"
    page.goto(f"file://{index}#/run/0/experts")
    page.locator(".heat canvas").first.wait_for()
    session.close()
    assert not problems
