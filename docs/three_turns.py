"""Draws docs/assets/three_turns.svg, the picture of the guide "Train an agent": python
docs/three_turns.py

An episode like those of `make demo-tools`, one box per token: who wrote it, whether it is learned
from, and which request's experts are replayed in its row.  It has a background of its own, so that
it is the same on light and dark pages.
"""

from itertools import pairwise
from pathlib import Path

PROMPT, MODEL, ENVIRONMENT = "prompt", "model", "environment"
SPANS = (
    ("prompt", "7*48+5=", PROMPT), ("turn 1", "[7*48]$", MODEL), ("tool", "=336_", ENVIRONMENT),
    ("turn 2", "[336+5]$", MODEL), ("tool", "=341_", ENVIRONMENT), ("turn 3", "341$", MODEL),
)  # fmt: skip
SHOWN = {"$": "&#9166;", "_": "&#9251;"}  # the end token, and a space
FILLS = {PROMPT: "#8a8f98", MODEL: "#2f6fb0", ENVIRONMENT: "#c2761f"}
REQUESTS = ("#3a9a5b", "#7d5ba6", "#b03a63")
FAINT, INK = "#e9ebee", "#23272e"
WIDTH, HEIGHT, LEFT, TOP = 22, 38, 106, 46


def routes(writers: list[str]) -> list[int | None]:
    """Per row the number of the request whose experts it holds: the one that sampled token j + 1,
    else the first that computed token j; None for the last token, which was never an input."""
    rows: list[int | None] = []
    request = 1
    for writer, following in pairwise(writers):
        if (
            writer == MODEL != following
        ):  # the end of a turn is input of the next request, with what the environment writes
            request += 1
        rows.append(request)
    return [*rows, None]


def box(column: int, row: int, fill: str, text: str) -> str:
    x, y = LEFT + column * WIDTH, TOP + row * HEIGHT
    color = INK if fill == FAINT else "#fff"
    return (
        f'<rect x="{x + 1}" y="{y}" width="{WIDTH - 2}" height="26" rx="3" fill="{fill}"/><text'
        f' x="{x + WIDTH / 2}" y="{y + 18}" text-anchor="middle" fill="{color}"'
        f' class="m">{text}</text>'
    )


def label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def draw() -> str:
    letters = "".join(text for _, text, _ in SPANS)
    writers = [writer for _, text, writer in SPANS for _ in text]
    parts = [
        label(LEFT - 8, TOP + row * HEIGHT + 18, name, "end")
        for row, name in enumerate(("token", "learned", "request"))
    ]
    for column, (letter, writer, request) in enumerate(
        zip(letters, writers, routes(writers), strict=True)
    ):
        parts.append(box(column, 0, FILLS[writer], SHOWN.get(letter, letter)))
        parts.append(
            box(column, 1, FILLS[MODEL], "&#10003;")
            if writer == MODEL
            else box(column, 1, FAINT, "")
        )
        parts.append(
            box(column, 2, FAINT, "-")
            if request is None
            else box(column, 2, REQUESTS[request - 1], str(request))
        )
    start = 0
    for name, text, _ in SPANS:
        parts.append(label(LEFT + (start + len(text) / 2) * WIDTH, TOP - 14, name, "middle"))
        start += len(text)
    width, height = LEFT + start * WIDTH + 12, TOP + 3 * HEIGHT + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        "<title>Tokens, masks and routes of three turns</title>"
        "<style>svg{font:14px system-ui,sans-serif}.m{font-family:ui-monospace,monospace}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "assets/three_turns.svg").write_text(draw())
