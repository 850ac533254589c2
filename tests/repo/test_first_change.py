"""The examples of docs/first_change.md fit the code of today; a slow test makes them and runs their
tests.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/first_change.md").read_text()
BLOCKS = re.findall(r"^`([\w./]+)`:\n\n```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\.venv/bin/python (-m pytest .+)$", PAGE, re.MULTILINE)
MOST_WORDS = 900


def changed(source: str, block: str) -> str:
    """Return a source with the lines of a block that begin with +; the others must be there
    once.
    """
    lines = block.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" ", " +"))
    places = [place.start() for place in re.finditer(f"^{re.escape(old)}", source, re.MULTILINE)]
    assert len(places) == 1, f"not in the source once:\n{old}"
    return source[: places[0]] + new + source[places[0] + len(old) :]


def test_the_page_is_short_and_has_three_examples():
    assert len(PAGE.split()) <= MOST_WORDS
    assert len(BLOCKS) == PAGE.count("```diff") == 10 and len(COMMANDS) == 3


@pytest.mark.parametrize(("path", "block"), BLOCKS, ids=[path for path, _ in BLOCKS])
def test_a_block_fits_its_file(path, block):
    source = (ROOT / path).read_text()
    assert len(changed(source, block)) > len(source)


def test_a_block_that_fits_no_place_or_two_is_refused():
    assert changed("a\nb\nc\n", "+x\n b\n") == "a\nx\nb\nc\n"
    for source in ("a\nc\n", "a\nb\nb\n", "a\n bb\n"):
        with pytest.raises(AssertionError, match="not in the source once"):
            changed(source, "+x\n b\n")


@pytest.mark.slow
def test_the_tests_of_the_examples_pass(tmp_path):
    """In a copy of the tracked files; the formatter and the linter accept the new lines."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for path, block in BLOCKS:
        (tmp_path / path).write_text(changed((tmp_path / path).read_text(), block))
    checks = ["-m ruff check .", "-m ruff format --check ."]
    for command in [*checks, *COMMANDS]:
        done = subprocess.run(
            [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
