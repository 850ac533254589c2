"""Draws one run, or several in the same panels.

megatron-rl report runs/demo                                  # writes runs/demo/report.png and \
report.html
megatron-rl report runs/none runs/R2 runs/R3 --out cmp.png    # one picture to compare
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    text = "picture of several runs; default: %(default)s"
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help=text)
    arguments = parser.parse_args(argv)
    from megatron_rl_viewer.report import write_report  # imports torch, which takes seconds

    try:
        if len(arguments.runs) == 1:
            print(write_report(arguments.runs[0]))
        else:
            print(draw_runs(arguments.runs, arguments.out))
    except (ValueError, OSError) as error:
        raise SystemExit(f"megatron-rl report: {error}") from error


def draw_runs(runs: list[Path], out: Path) -> Path:
    """Draw the runs, named by their directories, into the file `out`."""
    from megatron_rl.config.run_paths import RunFolder
    from megatron_rl.metrics.sinks import read_metrics
    from megatron_rl_viewer.figure import draw_comparison

    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    results = {
        name: read_metrics(RunFolder(run).metrics) for name, run in zip(names, runs, strict=True)
    }
    draw_comparison(results, " / ".join(results)).savefig(out, dpi=110)
    return out


if __name__ == "__main__":
    main()
