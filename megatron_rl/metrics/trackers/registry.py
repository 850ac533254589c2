"""The trackers that track.to names, every one on its own thread."""

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

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.config.sections.track import TRACKERS, TrackConfig
from megatron_rl.metrics.trackers.background import BackgroundTracker, Call
from megatron_rl.metrics.trackers.tracker import TrackedRun, Tracker

"""The file in the run's folder with {tracker: id of its run}."""


class TrackerClass(NamedTuple):
    """The class of a tracker and its requirement."""

    target: str
    """The class as "module:Class"."""
    package: str
    """The package that it needs, which is also the name of the extra of megatron_rl."""


PLACES = {
    name: TrackerClass(f"megatron_rl.metrics.trackers.to_{name}:{class_name}", name)
    for name, class_name in zip(
        TRACKERS, ("TensorBoard", "WandB", "MLflow", "Trackio"), strict=True
    )
}
REMOTE_VARIABLES = {"trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")}
"""Tracker -> environment variables that make it send its values over the network, whatever its
options say.
"""


def check_trackers(track: TrackConfig) -> None:
    """Raise ValueError for a tracker that cannot be used: a package, module or class is missing, or
    an environment variable contradicts track.mode.
    """
    for name in track.to:
        if name not in PLACES:
            load_class(name)
        elif importlib.util.find_spec(PLACES[name].package) is None:
            raise ValueError(
                f'track.to has "{name}", whose package is not installed; in the sources of'
                f" megatron_rl: pip install '.[{name}]', or remove it"
            )
        if track.mode != "offline":
            continue
        for variable in REMOTE_VARIABLES.get(name, ()):
            if os.environ.get(variable):
                raise ValueError(
                    f'track.mode = offline with "{name}", but the environment variable {variable}'
                    " sends its values over the network: unset it, or set track.mode = online"
                )


def load_class(name: str) -> Callable[[TrackedRun], Tracker]:
    """Import the Tracker `package.module:Class`.  Raises ValueError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        loaded = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"track.to has {name!r}: {error}; modules are looked for in {Path.cwd()}, PYTHONPATH"
            " and installed packages"
        ) from error
    if not isinstance(loaded, type) or not issubclass(loaded, Tracker):
        raise ValueError(
            f"track.to has {name!r}: must be a subclass of megatron_rl.metrics.trackers.Tracker"
        )
    return loaded


class Trackers:
    """The trackers that track.to names.

    ids: tracker -> id of the run to continue, from a checkpoint; ids in the trackers.json of the
    run's folder come first.
    """

    def __init__(
        self,
        track: TrackConfig,
        run: TrackedRun,
        log: Callable[[str], None],
        ids: Mapping[str, str] | None = None,
    ) -> None:
        self._track, self._folder = track, run.folder
        # the file comes last, as it may be newer than the checkpoint
        self._ids = {**(ids or {}), **read_ids(run.folder)}
        self._log = log
        # trackers open on several threads, and every one adds its id
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._trackers = [self._start(name, run, log) for name in track.to]

    @property
    def ids(self) -> dict[str, str]:
        """The ids to continue with: tracker -> id of its run."""
        with self._lock:
            return dict(self._ids)

    @property
    def failures(self) -> dict[str, int]:
        """The number of failed calls of this process, by tracker; a class of the user is named
        without its module.
        """
        return {tracker.name: tracker.failures for tracker in self._trackers}

    def put(self, call: Call) -> None:
        """Have `call` made with every tracker.  Returns at once."""
        for tracker in self._trackers:
            tracker.put(call)

    def close(self, *, failed: bool) -> None:
        # all at the same time: a scheduler may be about to kill the job
        with ThreadPoolExecutor(max(1, len(self._trackers))) as pool:
            for tracker in self._trackers:
                pool.submit(tracker.close, failed=failed, seconds=self._track.close_seconds)

    def _start(self, name: str, run: TrackedRun, log: Callable[[str], None]) -> BackgroundTracker:
        run = replace(run, id=self._ids.get(name, ""))

        def make() -> Tracker:
            return load_class(PLACES[name].target if name in PLACES else name)(run)

        return BackgroundTracker(
            name.rpartition(":")[2], make, log, lambda run_id: self._keep(name, run_id)
        )

    def _keep(self, name: str, run_id: str) -> None:
        if not run_id:
            return
        with self._lock:
            self._ids[name] = run_id
        # not under self._lock: training reads the ids at every step, and a disk may hang
        with self._file_lock:
            path = RunFolder(self._folder).tracker_ids
            temporary = path.with_name(f".{path.name}")
            try:
                # written beside and renamed: a killed process leaves the old file or the new one
                temporary.write_text(json.dumps(self.ids))
                temporary.replace(path)
            except OSError as error:
                self._log(f"WARNING {path}: {error}; a resume may not find the run of {name}")


def read_ids(folder: Path) -> dict[str, str]:
    """Return trackers.json; {} where it is missing or damaged: the trackers start new runs."""
    try:
        ids = json.loads(RunFolder(folder).tracker_ids.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(run_id) for name, run_id in ids.items()} if isinstance(ids, dict) else {}
