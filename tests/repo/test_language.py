"""The language rules of CONTRIBUTING.md, on every page and on every comment, docstring and message
of the code.
"""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "*.md", "docs/**/*.md", "examples/*/README.md", "megatron_rl/recipes/*/README.md",
    "results/*.md",
)  # fmt: skip
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
SOURCES = sorted(
    path
    for folder in ("megatron_rl", "tools", "viewer", "tests", "examples", "benchmarks")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if path != Path(__file__).resolve()
)
SCRIPTS = sorted(
    [
        ROOT / "Makefile",
        ROOT / "Dockerfile",
        ROOT / "Dockerfile.sglang",
        *ROOT.glob("tools/*.sh"),
        *ROOT.glob("examples/**/*.[st][ho]*"),
        *ROOT.glob("megatron_rl/recipes/*/*.[st][ho]*"),
    ]
)
AVOID = re.compile(
    r"\b(anew|amiss|nobody|at hand|under way|in turns|hand(?:s|ed|ing)? over|go(?:es|ne|ing)?"
    r" on|went on|carry on|greets?"
    r"|greeted|handshakes?|dull|whence|lest|heard of|stands? in|begun|behind|told"
    r"|capabilit(?:y|ies)|keepers?|saboteurs?|fleets?|unwanted|open groups?|makes? no sense|is no"
    r" number of)\b",
    re.IGNORECASE,
)
AVOID_IN_PAGES = re.compile(
    r"\b(gauges?|probes?|validity|pushes|pushed|push)\b", re.IGNORECASE
)  # code has functions of these names
# names, paths and quotations are not ours to choose
QUOTED = re.compile(r"`[^`]*`|\]\([^)]*\)|\"[^\"]*\"")
HISTORY = "CHANGELOG.md"  # it names the words of before


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of a page's lines outside code blocks."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def comments_and_strings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and string literal."""
    kinds = {
        tokenize.COMMENT,
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }  # 3.12 splits f-strings
    with open(path, "rb") as file:
        yield from (
            (token.start[0], token.string)
            for token in tokenize.tokenize(file.readline)
            if token.type in kinds
        )


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_pages():
    found = [
        f"{name(path)}:{number}: {match[0]}"
        for path in PAGES
        if path.name != HISTORY
        for number, line in prose(path.read_text())
        for pattern in (AVOID, AVOID_IN_PAGES)
        for match in pattern.finditer(QUOTED.sub("", line))
        if not match[0].isupper()  # an environment variable
    ]
    assert not found


def test_sources():
    found = [
        f"{name(path)}:{line + text.count(chr(10), 0, match.start())}: {match[0]}"
        for path in SOURCES
        for line, text in comments_and_strings(path)
        for match in AVOID.finditer(text)
    ]
    assert not found


def test_scripts():
    found = [
        f"{name(path)}:{number}: {match[0]}"
        for path in SCRIPTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in AVOID.finditer(line)
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    ['"""What goes on here."""\n', "x = 1  # begun\n", 'raise ValueError(f"{x} was told")\n'],
)
def test_old_words_are_found(tmp_path, text):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [match[0] for _, found in comments_and_strings(path) for match in AVOID.finditer(found)]
