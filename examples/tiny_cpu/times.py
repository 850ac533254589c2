"""Where the minutes of `make demo` went, as a table; the last lines of the demo.

python examples/tiny_cpu/times.py runs/demo .venv

Reads what install.sh and run.sh noted, and the run's events and metrics.  Only the standard
library: it must not take seconds itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

Part = tuple[str, float, str]
"""(what, seconds, a remark)."""


def parts_of(run: Path, environment: Path, now: float) -> list[Part]:
    """Return the parts in their order; an interrupted demo counts what this start did.

    Installation counts only for the demo that it preceded.
    """
    parts: list[Part] = []
    installed = environment / ".install_seconds"
    if installed.is_file():
        parts.append(("installation", float(installed.read_text()), ""))
        installed.unlink()
    model, began = map(float, (run / ".model_seconds").read_text().split())
    parts.append(("tiny model", model, "cold start" if model >= 10 else "was there"))
    events = [line for line in lines_of(run / "events.jsonl") if line["time"] >= began]
    start = next(line["time"] for line in events if line["kind"] in ("start", "resume"))
    stop = next(line["time"] for line in reversed(events) if line["kind"] == "stop")
    parts.append(("start", start - began, "imports, ranks, server"))
    first = next((line["step"] for line in events if line["kind"] == "resume"), 0)
    steps = {
        line["step"]: line
        for line in lines_of(run / "metrics.jsonl")
        if "time/step" in line and line["step"] > first
    }
    seconds = sum(line["time/step"] for line in steps.values())
    parts.append(("training", seconds, f"{len(steps)} steps: {stages(list(steps.values()))}"))
    evaluations = sum(line.get("seconds", 0.0) for line in events if line["kind"] == "evaluation")
    parts.append(("evaluation", evaluations, ""))
    rest = max(0.0, now - start - seconds - evaluations)
    parts.append(
        ("end", rest, f"checkpoints, export, report, {max(0.0, now - stop):.0f} s after the run")
    )
    return parts


def stages(steps: Sequence[dict]) -> str:
    """Return the largest stages of the steps."""
    totals: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            if name.startswith("time/") and name != "time/step" and isinstance(value, int | float):
                totals[name[5:]] = totals.get(name[5:], 0.0) + value
    largest = sorted(totals.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {clock(value)}" for name, value in largest)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def table(parts: Sequence[Part]) -> str:
    rows = [*parts, ("total", sum(seconds for _, seconds, _ in parts), "")]
    shown = [
        f"  {name:<13} {clock(seconds):>6}  {remark}".rstrip() for name, seconds, remark in rows
    ]
    return "\n".join(["where the time went", *shown])


def main() -> None:
    run, environment = map(Path, sys.argv[1:3])
    print(table(parts_of(run, environment, time.time())))


if __name__ == "__main__":
    main()
