"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.text import Text

Status = Literal["OK", "WARN", "FAIL"]
STYLES = {"OK": "bold green", "WARN": "bold yellow", "FAIL": "bold red"}
GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """A line of the report."""

    status: Status
    name: str
    found: str
    """The state of what was checked."""
    remedy: str = ""
    """The fix; empty for OK."""


def warn_if(is_limited: bool, name: str, result: str, remedy: str) -> Check:
    """Make a check of something that works, but may be limited."""
    return Check("WARN", name, result, remedy) if is_limited else Check("OK", name, result)


def fail_if(is_broken: bool, name: str, result: str, remedy: str) -> Check:
    """Make a check of something that is required."""
    return Check("FAIL", name, result, remedy) if is_broken else Check("OK", name, result)


def check_line(check: Check) -> Text:
    """Return the check as two lines of a terminal, or one line if it is OK."""
    text = Text.assemble(
        "  ", (f"{check.status:<5}", STYLES[check.status]), f"{check.name:<31}", check.found
    )
    if check.remedy:
        text.append(f"\n         -> {check.remedy}", style="dim" if check.status == "WARN" else "")
    return text
