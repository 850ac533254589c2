"""The documentation: the site builds without a warning, generated pages are current, lines are
wrapped.
"""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from megatron_rl.commands import PACKAGES
from megatron_rl.config.schema import SECTIONS
from megatron_rl.config.settings import meaning
from megatron_rl_tools import endpoint_reference, settings_reference
from tests.repo.test_language import PAGES, prose

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for pattern in (
        "*.yml",
        "Makefile",
        "[a-z]*/**/*.py",
        "examples/**/*.sh",
        "examples/**/*.toml",
        "tools/*.sh",
    )
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(("build", "runs"))
]
MAX_COLUMNS, MAX_README_LINES, MAX_CONTRIBUTING_LINES = 100, 110, 120


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)


def test_site_builds_without_a_warning(tmp_path):
    """Links, anchors, the navigation, and every object that the Python API names."""
    pytest.importorskip(
        "mkdocs", reason="mkdocs is not installed: pip install -r requirements-cpu.txt"
    )
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "source/CONTRIBUTING/index.html").is_file()
    assert (tmp_path / "source/examples/losses/sapo.py").is_file()
    api = (tmp_path / "reference/commands/index.html").read_text()
    assert 'id="megatron_rl.loss.policy_loss"' in api and 'id="megatron_rl.records.Rollout"' in api


def test_lines_are_wrapped():
    long = [
        f"{name(path)}:{number}: {len(line)} columns"
        for path in PAGES
        for number, line in prose(path.read_text())
        if len(line) > MAX_COLUMNS and not line.startswith("|") and " " in line.strip()
        if not line.startswith("![")
    ]
    assert not long, f"more than {MAX_COLUMNS} columns"


@pytest.mark.parametrize(
    ("page", "lines"),
    [("README.md", MAX_README_LINES), ("CONTRIBUTING.md", MAX_CONTRIBUTING_LINES)],
)
def test_the_first_pages_are_short(page, lines):
    assert len((ROOT / page).read_text().splitlines()) <= lines


def test_documents_that_sources_name_exist():
    missing = [
        f"{name(path)}: {document}"
        for path in SOURCES
        if path != Path(__file__).resolve()
        for document in re.findall(r"\b(?:docs|(?<![/\"])results)/[\w/]+\.md\b", path.read_text())
        if not (ROOT / document).is_file()
    ]
    assert not missing


def test_files_that_documents_name_exist():
    packages = (
        ROOT / "megatron_rl",
        ROOT / "tools/megatron_rl_tools",
        ROOT / "viewer/megatron_rl_viewer",
    )
    places = (ROOT, *packages, ROOT / "tests", ROOT / "tests/dist")
    missing = [
        f"{name(path)}:{number}: {file}"
        for path in PAGES
        if path.name != "CHANGELOG.md"
        for number, line in prose(path.read_text())
        for file in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|toml|sh))`", line)
        if not any((place / file).is_file() for place in places)
    ]
    assert not missing


def test_modules_that_the_changelog_names_exist():
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = re.findall(r"^\| `[\w/]+\.py` \| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert len(rows) > 50
    places = (
        ROOT / "megatron_rl",
        ROOT / "tools/megatron_rl_tools",
        ROOT / "viewer/megatron_rl_viewer",
    )
    assert not [path for path in rows if not any((place / path).is_file() for place in places)]


def test_settings_page_is_current():
    said = settings_reference.PAGE.read_text()
    assert said == settings_reference.page(), "run python -m megatron_rl_tools.settings_reference"


def test_fields_of_the_endpoint_are_current():
    said = endpoint_reference.PAGE.read_text()
    assert said == endpoint_reference.page(said), (
        "run python -m megatron_rl_tools.endpoint_reference"
    )
    with pytest.raises(ValueError, match="once"):
        endpoint_reference.page(said + said)


def test_every_field_of_the_endpoint_has_a_meaning():
    for door in endpoint_reference.DOORS.values():
        named = list(endpoint_reference.rows(door))
        assert len(named) > 12 and all(why.endswith(".") for _, _, why in named)
        assert len({name for name, _, _ in named}) == len(named)


def test_every_setting_has_a_meaning():
    settings = [(section, key) for section, kind in SECTIONS.items() for key in kind.model_fields]
    assert len(settings) > 100
    assert not [f"{section}.{key}" for section, key in settings if not meaning(section, key)]


def test_commands_page_lists_every_command():
    text = (ROOT / "docs/reference/commands.md").read_text()
    assert sorted(re.findall(r"^- \[`([\w-]+)`\]", text, re.MULTILINE)) == sorted(
        chain(*PACKAGES.values())
    )
