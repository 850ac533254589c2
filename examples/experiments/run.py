"""Run the cells of an experiment, one after the other, into its results folder:

    python -m examples.experiments.run paper_tiny [--tables n2 n8] [--lines r2 r3] [--seeds 0 1 2] \
[--results DIR] \
        [--section.key value ...]

One SGLang server serves all cells of one dtype (each pushes its own weights first), and another one
the teacher of the cells that have one.  Every cell is one rank, forked from this process so that
nothing of one cell reaches the next.  A run that finishes or diverges is a result, and is not run
again.  One that fails for another reason, or that takes too long, is written too (outcome), left
out of the analysis, and run again the next time; its file then lists the earlier attempts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.experiments.experiment import ENDED, NAMES, Cell, load_experiment
from megatron_rl.config import Config, load_config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.engine.optim import TrainingDiverged
from megatron_rl.metrics.lines import cut_partial_line
from megatron_rl.rollout.server.process import Server, launch_server
from megatron_rl.rollout.server.teacher_servers import start_teachers
from megatron_rl.train import train
from megatron_rl.trainer.build_teachers import with_addresses
from megatron_rl.weights.hf.fp8 import QuantizeError

ROOT = Path(__file__).resolve().parents[2]
DIVERGED = 3
"""Exit status of a cell whose weights or gradients are no longer finite."""
KEPT = (  # columns of a result file
    "rollout/reward_mean", "rollout/response_length_mean", "rollout/truncated_frac",
    "rollout/zero_advantage_groups_frac", "rollout/staleness_mean",
    "train/entropy", "train/kl_mu_pi", "train/kl_mu_pi_k3", "train/logratio_abs_max",
    "train/ratio_max", "train/ess", "train/clip_high_frac", "train/clip_low_frac",
    "train/tis_truncated_frac", "train/nonfinite_frac",
    "first_order/total_p95", "first_order/train_infer_p95", "first_order/staleness_p95",
    "logratio/f2_frac", "logratio/train_infer_p99", "logratio/staleness_p99",
    "routing/router_mismatch", "routing/replayed_mismatch", "routing/token_mismatch",
    "optim/grad_norm", "optim/skipped_updates", "time/step",
)  # fmt: skip
OF_TEACHER = ("teacher/reverse_kl", "teacher/divergence")
"""Columns of cells with a teacher, where they are measured."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=NAMES)
    parser.add_argument("--tables", nargs="+", default=[], help="only these tables")
    parser.add_argument("--lines", nargs="+", default=[], help="only these lines of the tables")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, help="default: examples/EXPERIMENT/results/cells")
    parser.add_argument("--timeout-minutes", type=float, default=30.0, help="for one cell")
    text = "start no cell after this time"
    parser.add_argument("--stop-after-minutes", type=float, default=float("inf"), help=text)
    arguments, overrides = parser.parse_known_args()
    os.chdir(ROOT)
    experiment = load_experiment(arguments.experiment)
    lines = [line for table in experiment.tables.values() for line in table.lines]
    for kind, names, known in (
        ("--tables", arguments.tables, list(experiment.tables)),
        ("--lines", arguments.lines, lines),
    ):
        if unknown := [name for name in names if name not in known]:
            choices = ", ".join(dict.fromkeys(known))
            parser.error(f"{kind} {' '.join(unknown)}: {experiment.name} has {choices}")
    tables = arguments.tables or list(experiment.tables)
    cells = list(experiment.cells(tables, arguments.seeds, arguments.lines))
    results = arguments.results or experiment.folder / "results/cells"
    results.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if stored(results, cell).get("outcome") not in ENDED]
    print(f"{len(cells)} cells, {len(todo)} to run", flush=True)
    failed = run_cells(todo, results, arguments, overrides)
    if failed:
        print(f"failed, to be tried again: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_cells(
    todo: list[Cell], results: Path, arguments: argparse.Namespace, overrides: list[str]
) -> list[str]:
    """Run the cells, write their results, and return the names of those that failed."""
    for cell in {cell.seed: cell for cell in todo}.values():
        make_model(cell.model, cell.experiment.model, seed=cell.seed)
    for experiment in {cell.experiment.name: cell.experiment for cell in todo}.values():
        if experiment.teacher:
            make_model(experiment.teacher_model, experiment.teacher)
    started, failed, commit = time.monotonic(), list[str](), code_version()
    dtype, teachers = "", dict[str, tuple[str, ...]]()
    with ExitStack() as to_the_end, ExitStack() as stack:
        server: Server | None = None
        for number, cell in enumerate(todo, 1):
            if time.monotonic() - started > 60 * arguments.stop_after_minutes:
                print(f"stopped before {cell.name}: --stop-after-minutes", flush=True)
                break
            needed = cell_config(cell, overrides)
            if server is None or server.process.poll() is not None or needed.rollout.dtype != dtype:
                stack.close()  # end the server of the earlier cells
                server, dtype = stack.enter_context(start_server(needed)), needed.rollout.dtype
            cfg = cell_config(cell, [*overrides, "--rollout.urls", server.url])
            if not cfg.teachers.by_name.keys() <= teachers.keys():
                teachers |= start_teachers(cfg, "cpu", to_the_end, print)
            urls = {name: teachers[name] for name in cfg.teachers.by_name}
            outcome, seconds = run_cell(with_addresses(cfg, urls), 60 * arguments.timeout_minutes)
            write(results, cell, result(cell, cfg, commit, outcome, seconds))
            if outcome not in ENDED:
                failed.append(cell.name)
            shutil.rmtree(RunFolder(cfg.run_dir).checkpoints, ignore_errors=True)
            print(
                f"{number}/{len(todo)} {cell.name}: {outcome} in {seconds:.0f} s; log"
                f" {log_path(cfg)}",
                flush=True,
            )
    return failed


def make_model(folder: Path, model: Mapping[str, Any], **settings: Any) -> None:
    """Make a checkpoint and its prompts in .cache, unless they exist."""
    options = [
        word
        for key, value in {**model, **settings}.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    subprocess.run(
        [sys.executable, "-m", "megatron_rl_tools.make_tiny_moe", str(folder), *options],
        cwd=ROOT,
        check=True,
    )


def cell_config(cell: Cell, overrides: list[str]) -> Config:
    """Return the experiment's shared settings with the cell's and `overrides`."""
    return load_config(cell.experiment.shared_settings, overrides, cell.settings())


def start_server(cfg: Config) -> Server:
    """Start a server for all cells, which have the same shapes: each sends its weights before it
    samples.
    """
    log = cfg.run.dir / "server.log"
    print(f"starting an SGLang server, log in {log}", flush=True)
    return launch_server(cfg.model.path, cfg.rollout, device="cpu", log_path=log, seed=cfg.run.seed)


def run_cell(cfg: Config, timeout_seconds: float) -> tuple[str, float]:
    """Train in a forked process, and return (outcome, seconds).

    The outcome is "finished", "diverged", "failed" or "timed out".
    """
    folder = RunFolder(cfg.run_dir)
    folder.metrics.unlink(missing_ok=True)
    for file in (*folder.line_files("rollouts"), *folder.line_files("trained")):
        file.path.unlink()
    folder.logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=train_in_child, args=(cfg,))
    process.start()
    process.join(timeout_seconds)
    if process.is_alive():
        process.terminate()
        process.join()
        return "timed out", time.monotonic() - start
    outcome = {0: "finished", DIVERGED: "diverged"}.get(process.exitcode or 0, "failed")
    return outcome, time.monotonic() - start


def train_in_child(cfg: Config) -> None:
    """Train with all output in the cell's log; the exit status says how it ended."""
    # open until the process ends
    sys.stdout = sys.stderr = open(log_path(cfg), "w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    try:
        train(cfg)
    except (TrainingDiverged, QuantizeError) as error:
        print(f"diverged: {error}", flush=True)
        raise SystemExit(DIVERGED) from error


def log_path(cfg: Config) -> Path:
    return RunFolder(cfg.run_dir).logs / "log.txt"


def result_path(results: Path, cell: Cell) -> Path:
    return results / f"{cell.name}.json"


def stored(results: Path, cell: Cell) -> dict[str, Any]:
    """Return the cell's file, or {} if there is none."""
    path = result_path(results, cell)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def write(results: Path, cell: Cell, content: dict[str, Any]) -> None:
    """Write the cell's file with the ends of its earlier attempts, so that no failure is lost."""
    if earlier := stored(results, cell):
        attempt = {key: earlier[key] for key in ("outcome", "seconds", "commit")}
        content["earlier_attempts"] = [*earlier.get("earlier_attempts", []), attempt]
    result_path(results, cell).write_text(json.dumps(content) + "\n")


def result(cell: Cell, cfg: Config, commit: str, outcome: str, seconds: float) -> dict[str, Any]:
    """Return a cell's result: its outcome, its settings, and the kept metrics as columns over its
    steps.

    Evaluations are {finished steps: score}.  A cell that failed before its first step has neither.
    """
    path = RunFolder(cfg.run_dir).metrics
    cut_partial_line(path)  # a cell that was stopped may have left one
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row for row in rows if "train/loss" in row]
    names = (*KEPT, *(name for name in OF_TEACHER if any(name in row for row in steps)))
    score = f"eval/heldout/avg@{cfg.eval.samples}"
    settings = cfg.model_dump(mode="json", exclude_none=True)
    settings["rollout"].pop("urls")
    return {
        "table": cell.table,
        "line": cell.line,
        "seed": cell.seed,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "commit": commit,
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
        "lr": cfg.optim.lr,
        "eval": {str(row["step"]): round(row[score], 4) for row in rows if score in row},
        "columns": {name: [short(row.get(name)) for row in steps] for name in names},
    }


def short(value: float | None) -> float | None:
    """Round to four significant digits, because results are committed."""
    return None if value is None else float(f"{value:.4g}")


def code_version() -> str:
    """Return the commit of the loaded code, with "+" if megatron_rl has uncommitted changes."""
    is_changed = git("status", "--porcelain", "megatron_rl")
    return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
