"""track.to -> trackers, each on a thread of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.sections.track import TRACKERS, TrackConfig
from megatron_rl.metrics.trackers.background import BackgroundTracker, Call
from megatron_rl.metrics.trackers.tracker import TrackedRun, Tracker

IDS_FILE = "trackers.json"
"""In the run's folder: {tracker: id of its run}."""


class TrackerClass(NamedTuple):
    """Of a tracker: its class as module:Class, and the package that it needs, which is also the
    name of its extra.
    """

    target: str
    package: str


PLACES = {
    name: TrackerClass(f"megatron_rl.metrics.trackers.to_{name}:{class_name}", name)
    for name, class_name in zip(
        TRACKERS, ("TensorBoard", "WandB", "MLflow", "Trackio"), strict=True
    )
}
REMOTE_VARIABLES = {"trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")}
"""Environment variables that send a tracker's values over the network whatever its options say."""


def check_trackers(track: TrackConfig) -> None:
    """Raise ValueError for a tracker that cannot be used here: a missing package, module or class,
    or a variable that contradicts track.mode."""
    for name in track.to:
        if name not in PLACES:
            load_class(name)
        elif importlib.util.find_spec(PLACES[name].package) is None:
            raise ValueError(
                f'track.to has "{name}", whose package is not installed; in the sources of'
                " megatron_rl: "
                f"pip install '.[{name}]', or remove it"
            )
        if set_ := [
            each
            for each in REMOTE_VARIABLES.get(name, ())
            if track.mode == "offline" and os.environ.get(each)
        ]:
            raise ValueError(
                f'track.mode = offline with "{name}", but the environment variable {set_[0]} sends'
                " its values over the network: unset it, or set track.mode = online"
            )


def load_class(name: str) -> Callable[[TrackedRun], Tracker]:
    """The class `package.module:Class`.  Raises ValueError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"track.to has {name!r}: {error}; modules are looked for in {Path.cwd()}, PYTHONPATH"
            " and installed packages"
        ) from error
    if not isinstance(found, type) or not issubclass(found, Tracker):
        raise ValueError(
            f"track.to has {name!r}: must be a subclass of megatron_rl.metrics.trackers.Tracker"
        )
    return found


class Trackers:
    """Those of track.to.

    Their runs continue those of trackers.json in the run's folder, else those of `ids`.
    """

    def __init__(
        self,
        track: TrackConfig,
        run: TrackedRun,
        log: Callable[[str], None],
        ids: Mapping[str, str] | None = None,
    ) -> None:
        self._track, self._folder = track, run.folder
        self._ids = {**(ids or {}), **read_ids(run.folder)}
        self._log = log
        # trackers open on several threads
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._all = [self._start(name, run, log) for name in track.to]

    @property
    def ids(self) -> dict[str, str]:
        """Tracker -> id of its run, of those that are open."""
        with self._lock:
            return dict(self._ids)

    @property
    def failures(self) -> dict[str, int]:
        """Tracker (a class of the user's by its name alone) -> failed calls of this process."""
        return {each.name: each.failures for each in self._all}

    def put(self, call: Call) -> None:
        for each in self._all:
            each.put(call)

    def close(self, *, failed: bool) -> None:
        # at once: a scheduler may be about to kill the job
        with ThreadPoolExecutor(max(1, len(self._all))) as pool:
            for each in self._all:
                pool.submit(each.close, failed=failed, seconds=self._track.close_seconds)

    def _start(self, name: str, run: TrackedRun, log: Callable[[str], None]) -> BackgroundTracker:
        its_run = replace(run, id=self._ids.get(name, ""))

        def make() -> Tracker:
            return load_class(PLACES[name].target if name in PLACES else name)(its_run)

        return BackgroundTracker(
            name.rpartition(":")[2], make, log, lambda run_id: self._keep(name, run_id)
        )

    def _keep(self, name: str, run_id: str) -> None:
        if not run_id:
            return
        with self._lock:
            self._ids[name] = run_id
        # not the other one: training reads the ids at every step, and a disk may hang
        with self._file_lock:
            temporary = self._folder / f".{IDS_FILE}"
            try:
                temporary.write_text(json.dumps(self.ids))
                temporary.replace(self._folder / IDS_FILE)
            except OSError as error:
                self._log(
                    f"WARNING {self._folder / IDS_FILE}: {error}; a resume may not find the run of"
                    f" {name}"
                )


def read_ids(folder: Path) -> dict[str, str]:
    """trackers.json; {} where there is none, or it is damaged: the trackers start new runs."""
    try:
        found = json.loads((folder / IDS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return (
        {str(name): str(run_id) for name, run_id in found.items()}
        if isinstance(found, dict)
        else {}
    )
