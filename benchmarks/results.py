"""Keep what a measurement printed in results/NAME.json, and quote it in the documents:

    # prints as before, then saves
    python -m benchmarks.results [--note TEXT] save NAME python benchmarks/align.py ...
    # part of `make figures`
    python -m benchmarks.results quote

A document quotes a file in two ways, which tests/repo/test_results.py checks:
    <!-- results: NAME -->  or  NAME table N [columns A,B,...] [rows REGEX]  or  NAME lines REGEX
    <!-- end of results -->
        what the command printed, the Nth table of it (some columns, counted from 1, and the rows
        that match), or the lines that match; `quote` writes what is in between
    [60 kills](results/kills.json)          a link whose text the file has, word by word

Shapes: `output` is the list of lines that the command printed to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "numpy")
BLOCK = re.compile(
    r"(<!-- results: (\S+)(?: (table|lines) (.+?))? -->\n)(.*?)(<!-- end of results -->)", re.DOTALL
)
# without a digit it quotes nothing
LINK = re.compile(r"\[([^\]]*\d[^\]]*)\]\([^)\s]*\bresults/(\w+)\.json\)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["save", "quote"])
    parser.add_argument("name", nargs="?", help="of the file in results/")
    parser.add_argument(
        "--note", default="", help="about the machine, for instance what else was running"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.action == "quote":
        for page in pages():
            page.write_text(quoted(page.read_text()))
        return 0
    if not arguments.name or not arguments.command:
        parser.error("save: needs a name and a command")
    return save(arguments.name, arguments.command, arguments.note)


def save(name: str, command: list[str], note: str = "") -> int:
    """Run the command, write results/NAME.json, and return the exit status of the command."""
    started, load, lines = time.monotonic(), os.getloadavg()[0], []
    words = [sys.executable, *command[1:]] if command[0] == "python" else command
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip().replace(str(ROOT), "."))
    facts = {
        "command": shlex.join(command),
        "exit_status": process.returncode,
        "commit": code_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.monotonic() - started),
        "machine": {
            **machine(),
            "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
            "note": note,
        },
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "output": lines,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return process.returncode


def machine() -> dict[str, Any]:
    """Return sizes and the kind of the CPU, but nothing that identifies the machine."""
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = round(psutil.virtual_memory().total / 2**30)
    return {
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "cpu": models[0] if models else platform.machine(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_version() -> str:
    """Return the last commit that changed the package, with "+" if it has uncommitted changes."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    commit = git("log", "-1", "--format=%h", "--", "megatron_rl")
    return commit + ("+" if git("status", "--porcelain", "megatron_rl") else "")


# Quotes -------------------------------------------------------------------------------------------


def pages() -> Iterator[Path]:
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "results/*.md"):
        yield from sorted(ROOT.glob(pattern))


def quoted(text: str) -> str:
    """Return the text of a page with all of its blocks written again."""
    return BLOCK.sub(lambda match: match[1] + block(match[2], match[3], match[4]) + match[6], text)


def block(name: str, kind: str | None, which: str | None) -> str:
    """Return the text of a block.

    Lines that match REGEX are in a code fence, as the program prints them.
    """
    lines = output(name)
    if kind == "table":
        return "\n".join(part_of_table(tables(lines), which or "1")) + "\n"
    if kind == "lines":
        return "\n".join(
            ["```", *(line for line in lines if re.search(which or "", line)), "```\n"]
        )
    parts = (
        "\n".join(part).strip("\n") for _, part in groupby(lines, lambda line: line.startswith("|"))
    )
    # Markdown needs an empty line before a table
    return "\n\n".join(part for part in parts if part) + "\n"


def part_of_table(every: list[list[str]], which: str) -> list[str]:
    """Return the table that `N [columns A,B,...] [rows REGEX]` names: its head, and the rows that
    match.
    """
    rest, _, pattern = which.partition(" rows ")
    number, _, columns = rest.partition(" columns ")
    head, line, *rows = every[int(number) - 1]
    chosen = [head, line, *(row for row in rows if re.search(pattern, row))]
    if not columns:
        return chosen
    places = [int(place) - 1 for place in columns.split(",")]
    cells = ([*row.strip("|").split("|")] for row in chosen)
    return ["|" + "|".join(row[place] for place in places) + "|" for row in cells]


def output(name: str) -> list[str]:
    lines: list[str] = json.loads((RESULTS / f"{name}.json").read_text())["output"]
    return lines


def tables(lines: list[str]) -> list[list[str]]:
    return [
        list(rows)
        for is_table, rows in groupby(lines, lambda line: line.startswith("|"))
        if is_table
    ]


def wrong_links(text: str) -> list[tuple[str, str]]:
    """Return (quote, name) of each link whose text its file does not have."""
    quotes = ((" ".join(quote.split()), name) for quote, name in LINK.findall(text))
    return [
        (quote, name)
        for quote, name in quotes
        if quote not in " ".join(" ".join(output(name)).split())
    ]


if __name__ == "__main__":
    sys.exit(main())
