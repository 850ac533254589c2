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
    """What was found; `remedy` is empty for OK."""

    status: Status
    name: str
    found: str
    remedy: str = ""


def warn_if(is_limited: bool, name: str, found: str, remedy: str) -> Check:
    """A check of something that works, but with a limit."""
    return Check("WARN", name, found, remedy) if is_limited else Check("OK", name, found)


def fail_if(is_broken: bool, name: str, found: str, remedy: str) -> Check:
    """A check of something that is required."""
    return Check("FAIL", name, found, remedy) if is_broken else Check("OK", name, found)


def check_line(check: Check) -> Text:
    """The check as two lines of a terminal, one line if it is OK."""
    text = Text.assemble(
        "  ", (f"{check.status:<5}", STYLES[check.status]), f"{check.name:<31}", check.found
    )
    if check.remedy:
        text.append(f"\n         -> {check.remedy}", style="dim" if check.status == "WARN" else "")
    return text
