"""One run folder: its files, followed while they are written, and what is wrong with them."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

from megatron_rl.config.renamed import with_new_names
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.health import examine
from megatron_rl_viewer.index import Index, database_path, is_inside
from megatron_rl_viewer.metrics import EventsFile, MetricsFile
from megatron_rl_viewer.pieces import Pieces

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
LIVE_SECONDS = 300.0
"""Seconds after its last write in which a run counts as live."""


class NoRunError(ValueError):
    """A folder that is no run."""


class Run:
    """The viewer's state of one run.  Raises NoRunError unless the folder has a file of a run."""

    def __init__(self, folder: Path, cache: Path, tokenizer: Path | None = None) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.paths = RunFolder(folder)
        if not folder.is_dir():
            raise NoRunError(
                f"{folder}: no such folder; name a run directory, which holds config.toml and"
                " metrics.jsonl"
            )
        if not self._files():
            raise NoRunError(
                f"{folder}: no config.toml, metrics.jsonl or rollouts; name a run directory"
                " (run.dir/run.name)"
            )
        self.name = folder.resolve().name
        self.metrics, self.events = MetricsFile(folder), EventsFile(folder)
        self.index = Index(folder, database_path(folder, cache))
        self._pieces: Pieces | None = None
        self.problem: str | None = None  # the reason if the index is no longer followed

    def _files(self) -> list[Path]:
        """Return the files by which a folder is a run, the last of rollouts among them."""
        paths = [self.paths.config, self.paths.metrics, self.paths.events]
        paths += [file.path for file in self.paths.line_files("rollouts")[-1:]]
        return [path for path in paths if is_inside(self.folder, path)]

    def update(self, stop: Event | None = None) -> None:
        """Read what was written since the last call."""
        self.read_small()
        try:
            self.index.update(stop)
            self.problem = None
        except (OSError, sqlite3.Error) as error:
            if self.problem is None:
                logger.warning("%s: %s", self.index.path, error)
            self.problem = (
                f"{self.index.path.name}: the index cannot be written: {error}; set --cache DIR"
            )

    def read_small(self) -> None:
        self.metrics.update()
        self.events.update()

    # Answers --------------------------------------------------------------------------------------

    @property
    def config_text(self) -> str:
        path = self.paths.config
        if not is_inside(self.folder, path):
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    def config(self) -> tuple[dict[str, object], str | None]:
        """Return ({"section.key": value}, a problem with the file or None).

        Former names of settings are replaced.
        """
        try:
            sections = with_new_names(tomllib.loads(self.config_text))
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            return {}, f"{self.paths.config.name}: cannot be read: {error}"
        flat = {
            f"{section}.{key}": value
            for section, keys in sections.items()
            for key, value in keys.items()
        }
        return flat, None if flat else f"{self.paths.config.name}: not found"

    def warnings(self) -> list[str]:
        problems = [
            self.config()[1],
            *self.metrics.all_warnings,
            *self.events.warnings,
            *self.index.warnings,
            self.problem,
        ]
        return [problem for problem in problems if problem]

    def is_live(self) -> bool:
        """Return whether the run may still write: it is not stopped, and changed within
        LIVE_SECONDS.
        """
        events = self.events.events
        if events and events[-1]["kind"] == "stop":
            return False
        written = [path for path in self._files() if path != self.paths.config]
        changed = max((path.stat().st_mtime for path in written), default=0.0)
        return time.time() - changed < LIVE_SECONDS

    @property
    def num_steps(self) -> int | None:
        value = self.config()[0].get("run.num_steps")
        return value if isinstance(value, int) else None

    def health(self) -> list[dict[str, str | int | None]]:
        """Return the findings about the run's health, in words (metrics/health.py)."""
        table = self.metrics.table()
        evaluated, steps = table["evaluations"], table["steps"]
        metrics = dict(table["metrics"])
        for name, values in evaluated["metrics"].items():
            of_step = dict(zip(evaluated["steps"], values, strict=True))
            metrics[name] = [of_step.get(step, math.nan) for step in steps]
        return [finding.to_json() for finding in examine(steps, metrics, self.config()[0])]

    def indexing(self) -> str | None:
        """Return a note for pages while the run is being read, else None."""
        share = self.index.progress
        return None if share is None else f"this run is being indexed ({share:.0%})"

    def not_saved(self) -> str | None:
        """Return why a response may have no tokens although nothing is damaged; None if the run
        saved those of all responses.
        """
        saved = self.config()[0].get("rollout.save_tensors", True)
        if saved is True:
            return None
        setting = f"rollout.save_tensors = {str(saved).lower()}"
        return f"this run did not save the tokens of this response ({setting})"

    def model_folders(self) -> list[Path]:
        """Return the folders that may have the run's model: its last HF checkpoint, and model.path,
        which is relative to the folder in which training started.
        """
        if self.tokenizer is not None:
            return [self.tokenizer]
        path = self.config()[0].get("model.path")
        if not isinstance(path, str):
            return [self.paths.hf]
        above = self.folder.resolve().parents
        return [
            self.paths.hf,
            Path(path),
            *([] if Path(path).is_absolute() else [folder / path for folder in above]),
        ]

    def pieces(self, missing: list[str]) -> Pieces | None:
        """Return the tokenizer, or None with the reason in `missing`: then token ids are shown."""
        if self._pieces is None:
            problems = []
            names = ("tokenizer.json", "tokenizer_config.json")
            for folder in self.model_folders():
                if any((folder / name).is_file() for name in names):
                    try:
                        self._pieces = Pieces(folder)
                        return self._pieces
                    except ValueError as error:
                        problems.append(str(error))
            places = ", ".join(map(str, self.model_folders()[:2]))
            missing_everywhere = f"no tokenizer in {places} (--tokenizer DIR names another folder)"
            problems = problems or [missing_everywhere]
            missing += [f"{problem}: token ids are shown" for problem in problems]
        return self._pieces

    def summary(self, number: int) -> dict[str, object]:
        """Return the run's entry of /api/runs."""
        self.read_small()
        with closing(self.index.connect()) as connection:
            readable = "SELECT 1 FROM shards WHERE error IS NULL LIMIT 1"
            has_tensors = connection.execute(readable).fetchone() is not None
            total = connection.execute("SELECT count(*) FROM rollouts").fetchone()[0]
        return {
            "id": number,
            "name": self.name,
            "path": str(self.folder.resolve()),
            "steps": self.metrics.last_step,
            "num_steps": self.num_steps,
            "live": self.is_live(),
            "has_tensors": has_tensors,
            "rollouts": total,
            "indexing": self.index.progress,
            "revision": self.metrics.revision + self.index.revision,
            "warnings": self.warnings(),
        }


def setting_differences(
    a: Mapping[str, object], b: Mapping[str, object]
) -> list[dict[str, object]]:
    """Return the settings that differ; the value of a missing key is None."""
    names = sorted(a.keys() | b.keys())
    return [
        {"key": name, "a": a.get(name), "b": b.get(name)}
        for name in names
        if a.get(name) != b.get(name)
    ]


class Runs:
    """The runs of one viewer.  A thread follows each run: indexing one must not stop the others."""

    def __init__(self, folders: list[Path], cache: Path, tokenizer: Path | None = None) -> None:
        self.runs = [Run(folder, cache, tokenizer) for folder in folders]
        names = [run.name for run in self.runs]
        for run in self.runs:
            if names.count(run.name) > 1:
                run.name = str(run.folder)
        self._stop = Event()
        self._threads = [Thread(target=self._follow, args=(run,), daemon=True) for run in self.runs]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, run: Run) -> None:
        try:
            while not self._stop.is_set():
                run.update(self._stop)
                self._stop.wait(FOLLOW_SECONDS)
        # the thread ends with its traceback, and the page shows why nothing new comes
        except BaseException as error:
            run.problem = (
                f"the run is not followed any more: {error!r}; start megatron-rl view again"
            )
            raise
