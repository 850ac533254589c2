"""The command `megatron-rl trace`: merge the ranks' files and print the time of each stage.

options.py parses its arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.trace_file import (
    LAST,
    merge,
    read_rank,
    read_ranks,
    step_folder,
    step_folder_name,
    write_lines,
)
from megatron_rl_tools.trace.gpu import gpu_events
from megatron_rl_tools.trace.options import parse
from megatron_rl_tools.trace.picture import draw
from megatron_rl_tools.trace.trace_summary import summarize_trace


def main(argv: list[str] | None = None) -> int:
    """Merge the traces and return the exit status: 0, or 2 for a folder without traces."""
    arguments = parse(argv)
    try:
        folder = find_folder(arguments.run, arguments.step)
        ranks = [gpu_events(rank, folder) for rank in read_ranks(folder)]
        events = merge(ranks)
        out = arguments.out or folder.with_suffix(".json.gz")
        write_lines(out, events, {"run": arguments.run.resolve().name, "step": ranks[0].step + 1})
        summary = summarize_trace(events)
        print("\n".join(summary.lines()))
        if arguments.picture is not None:
            draw(events, summary).savefig(arguments.picture, dpi=130)
    except (ValueError, OSError) as error:
        print(f"megatron-rl trace: {error}", file=sys.stderr)
        return 2
    viewers = "https://ui.perfetto.dev, which reads it in the browser, or in chrome://tracing"
    print(f"{out}: open it in {viewers}")
    return 0


def find_folder(run: Path, step: int | None) -> Path:
    """Return the folder of a step's trace.  Raises ValueError if there is none."""
    traces = RunFolder(run).traces
    folders = sorted(path.parent for path in traces.glob("*/rank_00000.json.gz"))
    if not folders:
        raise ValueError(
            f'{run}: no traces in {traces.name}/; run with --run.trace last, or "every N"'
        )
    if step is None:
        return max(folders, key=lambda folder: (folder / "rank_00000.json.gz").stat().st_mtime)
    wanted = step_folder(run, step_folder_name(step - 1))
    for folder in (wanted, step_folder(run, LAST)):
        if folder in folders and read_rank(folder / "rank_00000.json.gz").step == step - 1:
            return folder
    names = ", ".join(folder.name for folder in folders)
    raise ValueError(f"{run}: step {step} was not traced; there are {names}")


if __name__ == "__main__":
    sys.exit(main())
