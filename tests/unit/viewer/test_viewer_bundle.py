"""The viewer's committed bundle: as new as its sources, self-contained, and readable in both colour
modes.
"""

import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VIEWER, STATIC = ROOT / "viewer/web", ROOT / "viewer/megatron_rl_viewer/static"
SOURCES = sorted(path for path in (VIEWER / "src").rglob("*") if path.is_file())
COLORS = json.loads((VIEWER / "src/colors.json").read_text())
TEXT, GRAPHICS = 4.5, 3.0
"""WCAG 2.2, level AA: least contrast of text, and of parts of graphics and controls."""


def sources_hash() -> str:
    """As build.mjs computes it."""
    files = {
        path.relative_to(VIEWER).as_posix(): path
        for path in [*SOURCES, VIEWER / "build.mjs", VIEWER / "package-lock.json"]
    }
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_bundle_is_that_of_its_sources():
    built = (STATIC / "sources.sha256").read_text().strip()
    assert built == sources_hash(), (
        "viewer/ changed: run `make viewer` and commit viewer/megatron_rl_viewer/static"
    )


def test_the_bundle_is_complete_and_small():
    assert {path.name for path in STATIC.iterdir()} == {
        "index.html",
        "app.js",
        "app.css",
        "icon.svg",
        "colors.json",
        "LICENSES.txt",
        "sources.sha256",
    }
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 300_000
    licenses = (STATIC / "LICENSES.txt").read_text()
    for name in json.loads((VIEWER / "package.json").read_text())["dependencies"]:
        assert re.search(rf"^{name} \d.*\(MIT\)$", licenses, re.MULTILINE)


def test_nothing_is_fetched_from_outside_and_nothing_is_inline():
    page = (STATIC / "index.html").read_text()
    assert all(src.startswith("static/") for src in re.findall(r'(?:src|href)="([^"]*)"', page))
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page)
    assert not re.search(r"@import|url\(", (STATIC / "app.css").read_text())
    addresses = set(re.findall(r"https?://[\w./-]+", (STATIC / "app.js").read_text()))
    assert all(address.startswith("http://www.w3.org/") for address in addresses), (
        "namespaces of SVG and MathML alone"
    )
    assert not re.search(r"\beval\(|new Function\(", (STATIC / "app.js").read_text())


def test_text_is_never_html():
    for path in SOURCES:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write",
            path.read_text(),
            re.IGNORECASE,
        ), path


def test_sources_are_short_and_ascii():
    for path in SOURCES:
        text = path.read_text()
        assert text.isascii(), path
        assert len(text.splitlines()) <= 400, path
        assert max(map(len, text.splitlines())) <= 160, path


# Contrast -----------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    """Relative luminance of an sRGB colour "#rrggbb" (WCAG 2.2)."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_has_it():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("mode", COLORS)
def test_texts_have_contrast(mode):
    colors = COLORS[mode]
    texts = ["text", "muted", "accent", "good", "watch", "bad", "flip"]
    for text, background in itertools.product(texts, ["bg", "panel"]):
        assert contrast(colors[text], colors[background]) >= TEXT, (text, background)
    assert contrast(colors["bg"], colors["accent"]) >= TEXT, "a pressed button"
    assert contrast(colors["bg"], colors["flip"]) >= TEXT, "where responses part"
    for scale in ("sequential", "diverging", "category"):
        for step, background in enumerate(colors[scale]):
            assert contrast(colors["text"], background) >= TEXT, (scale, step)


@pytest.mark.parametrize("mode", COLORS)
def test_lines_and_controls_have_contrast(mode):
    colors = COLORS[mode]
    for part in ("control", "flip", *colors["series"]):
        assert contrast(colors.get(part, part), colors["bg"]) >= GRAPHICS, part


@pytest.mark.parametrize("mode", COLORS)
def test_scales_are_told_apart_without_hue(mode):
    """Luminance alone orders sequential scales: they can be read by the colour-blind, and in
    grey.
    """
    for scale in ("sequential", "heat"):
        steps = [luminance(color) for color in COLORS[mode][scale]]
        assert steps == sorted(steps, reverse=mode == "light")
    diverging = COLORS[mode]["diverging"]
    blue, red = (
        int(diverging[0][place : place + 2], 16) - int(diverging[-1][place : place + 2], 16)
        for place in (5, 1)
    )
    assert blue > 0 > red, (
        "blue against orange, which every common kind of colour blindness tells apart"
    )
    middle = luminance(diverging[4])
    assert all(contrast(diverging[4], end) > 1.5 for end in (diverging[0], diverging[-1])), middle
