"""results/: every file says what was run, on which commit and machine; documents quote from these
files, and mark all else.
"""

import json
import re
import subprocess

import pytest

from benchmarks import results
from benchmarks.results import (
    BLOCK,
    LINK,
    RESULTS,
    ROOT,
    pages,
    part_of_table,
    quoted,
    save,
    tables,
    wrong_links,
)

FILES = sorted(RESULTS.glob("*.json"))
PAGES = list(pages())
NOT_KEPT = re.compile(r"measured\s+once,\s+not\s+kept", re.IGNORECASE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_was_run_and_where(path):
    facts = json.loads(path.read_text())
    assert (
        facts["command"]
        and facts["output"]
        and facts["seconds"] >= 0
        and facts["machine"]["cores"] > 0
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"]) and facts["versions"]["torch"]
    assert re.fullmatch(r"[0-9a-f]{7,}", facts["commit"]), "of a tree without uncommitted changes"
    assert not lacking([facts["commit"]])


def lacking(commits):
    """Return those that the repository does not have; none where it cannot be known (no repository,
    or only its last commits).
    """

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return []
    return [commit for commit in commits if git("cat-file", "-e", commit).returncode]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documents_quote_what_the_files_have(page):
    text = page.read_text()
    assert quoted(text) == text, "make figures"
    assert wrong_links(text) == []
    opened = len(re.findall(r"<!-- results: ", text))
    assert opened == len(BLOCK.findall(text)) == text.count("<!-- end of results -->"), (
        "a marker that is not read"
    )


def test_what_is_quoted_succeeded_and_every_file_is_quoted():
    text = "\n".join(page.read_text() for page in PAGES)
    names = {match[1] for match in BLOCK.findall(text)} | {name for _, name in LINK.findall(text)}
    assert names == {path.stem for path in FILES}
    assert not [path.stem for path in FILES if json.loads(path.read_text())["exit_status"]]


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_of_results_name_the_command_of_each_file(page):
    text = " ".join(page.read_text().split())  # a command may be wrapped
    names = {match[1] for match in BLOCK.findall(page.read_text())}
    commands = {
        name: json.loads((RESULTS / f"{name}.json").read_text())["command"] for name in names
    }
    assert not {name: command for name, command in commands.items() if command not in text}


def sections(text):
    """(heading, text) of each section, without those below it."""
    parts = re.split(
        r"^(#+ .+)$",
        re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE),
        flags=re.MULTILINE,
    )
    return zip(parts[1::2], parts[2::2], strict=True)


def test_what_is_measured_has_a_file_or_says_that_it_has_none():
    """On pages of figures every table with numbers, elsewhere what is called measured.

    The commit of the text exists.
    """
    unmarked, commits = [], set()
    for page in PAGES:
        has_figures = page.parent == RESULTS
        figures = r"^\|.*\d.*\|$" if has_figures else r"\*\*Measured.*\d|^Measured.*\d"
        for heading, text in sections(page.read_text()) if page.name != "CHANGELOG.md" else ():
            is_marked = "<!-- results: " in text or LINK.search(text) or NOT_KEPT.search(text)
            if re.search(figures, text, re.MULTILINE) and not (
                is_marked or re.search(r"\*\*(Simulated|Computed)", text)
            ):
                unmarked.append(f"{page.relative_to(ROOT)}: {heading}")
            commits |= set(re.findall(r"not\s+kept[^\w]*\b([0-9a-f]{7})\b", text))
    assert not unmarked
    assert len(commits) > 10 and not lacking(sorted(commits))


def test_a_command_is_kept_with_its_output_and_status(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    program = (
        "print('| a |'); print('|---|'); print('| 1.5 |'); print(); print('60 kills'); raise"
        " SystemExit(3)"
    )
    assert save("trial", ["python", "-c", program], "shared") == 3
    assert "| 1.5 |" in capfd.readouterr().out, "it prints as before"
    facts = json.loads((tmp_path / "results/trial.json").read_text())
    assert (
        facts["exit_status"] == 3
        and facts["machine"]["note"] == "shared"
        and facts["command"].startswith("python -c ")
    )
    assert tables(facts["output"]) == [["| a |", "|---|", "| 1.5 |"]]
    text = (
        "<!-- results: trial table 1 -->\n| 2.5 |\n<!-- end of results"
        " -->\n[60\nkills](results/trial.json)"
    )
    assert (
        quoted(text) == text.replace("| 2.5 |", "| a |\n|---|\n| 1.5 |") and wrong_links(text) == []
    )
    assert quoted(text.replace("table 1", "table 1 rows ^2")).count("|") == 4, "head and line alone"
    lines = quoted("<!-- results: trial lines ^6 -->\n<!-- end of results -->")
    assert lines == "<!-- results: trial lines ^6 -->\n```\n60 kills\n```\n<!-- end of results -->"
    assert wrong_links("[61 kills](../results/trial.json)") == [("61 kills", "trial")]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("1", ["| a | b |", "|---|---|", "| x | 1 |", "| y | 2 |"]),
        ("1 rows y", ["| a | b |", "|---|---|", "| y | 2 |"]),
        ("1 columns 2", ["| b |", "|---|", "| 1 |", "| 2 |"]),
        ("1 columns 2,1 rows x", ["| b | a |", "|---|---|", "| 1 | x |"]),
    ],
)
def test_a_part_of_a_table_is_quoted(which, expected):
    assert part_of_table([["| a | b |", "|---|---|", "| x | 1 |", "| y | 2 |"]], which) == expected
