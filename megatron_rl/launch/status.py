"""status.json of a run's folder: what every rank does, for `megatron-rl top`.  Imports no torch.

Rank 0 writes it every STATUS_SECONDS, on a thread of its own: a file system that hangs must not
stop the heartbeats.  A file without a recent `time` belongs to a run that was killed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from megatron_rl.config.redact import Redactor
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.log_lines import strict

logger = logging.getLogger(__name__)

STATUS_SECONDS = 2.0
SCHEMA = 1
State = Literal["running", "finished", "stopped", "failed"]


class Beat(Protocol):
    """The parts of a rank's heartbeat that are read here (heartbeats.Heartbeat)."""

    @property
    def count(self) -> int: ...
    @property
    def where(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def message(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def memory(self) -> int: ...


@dataclass(frozen=True)
class RankStatus:
    """A rank in status.json."""

    rank: int
    host: str
    where: str
    seconds: float
    """Time in its stage at its last heartbeat."""
    waits_for: str = ""
    """Servers that it waits for, or the error of a rank that failed."""
    memory: int = 0
    """Bytes in use."""
    silent: float = 0.0
    """Seconds from its last heartbeat to the last reading."""


@dataclass(frozen=True)
class Status:
    """The content of status.json; times are Unix seconds."""

    time: float
    state: State = "running"
    """stopped: by a signal or an interrupt; failed: `text` says why."""
    text: str = ""
    started: float = 0.0
    pid: int = 0
    step: int = 0
    """Finished steps."""
    num_steps: int = 0
    step_seconds: float = 0.0
    """Duration of the last step."""
    policy_version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step, those in SHOWN."""
    ranks: Sequence[RankStatus] = ()
    servers: Sequence[str] = ()
    """URLs; `top` asks the servers themselves for more."""


SHOWN = (
    "rollout/reward_mean", "rollout/tokens_per_second", "perf/train_tokens_per_second",
    "routing/router_mismatch", "routing/replayed_mismatch", "train/kl_mu_pi", "optim/grad_norm",
)  # fmt: skip
"""Metrics in status.json."""


class StatusWriter:
    """Keeps status.json of `folder` up to date.  Use it as a context manager.

    All methods but `close` return at once.  `stopped` are exceptions that end a run without a
    failure.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        *,
        hidden: Iterable[str] = (),
        stopped: tuple[type[BaseException], ...] = (),
    ) -> None:
        now = time.time()
        self._redactor = Redactor(hidden)
        self._path = RunFolder(folder).status
        self._status = Status(now, started=now, pid=os.getpid(), num_steps=num_steps)
        self._beats: Mapping[int, Beat] = {}
        self._read = 0.0  # when they were read
        self._last_seen: dict[int, tuple[int, float]] = {}
        """Rank -> its count of heartbeats, and when that changed."""
        self._stopped = stopped
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.failures = 0
        self.urls: Callable[[], Sequence[str]] = tuple
        """The servers that are sampled from; called in the thread."""

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, (KeyboardInterrupt, *self._stopped)):
            self.close("stopped", str(error))
        else:
            self.close("failed", f"{type(error).__name__}: {error}")

    def beats(self, beats: Mapping[int, Beat]) -> None:
        """Take all ranks' heartbeats, as the watchdog has read them."""
        self._beats, self._read = beats, time.monotonic()

    def note(self, **values: object) -> None:
        """Set fields of Status."""
        with self._lock:
            # names are checked by `replace`
            self._status = replace(self._status, **values)  # type: ignore[arg-type]

    def close(self, state: State, text: str = "") -> None:
        """Write the last file, and wait for that for a few seconds at most."""
        self.note(state=state, text=text[:2000])
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(3 * STATUS_SECONDS)

    def _run(self) -> None:
        self._write()  # replaces that of an earlier process
        while not self._done.wait(STATUS_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        shown = self._redactor.text
        ranks = [
            RankStatus(
                rank,
                beat.host,
                beat.where,
                beat.seconds,
                beat.message and shown(beat.message),
                beat.memory,
                silent=round(self._silence(rank, beat), 1),
            )
            for rank, beat in self._beats.items()
        ]
        with self._lock:
            status = replace(
                self._status, time=time.time(), text=shown(self._status.text), ranks=ranks
            )
        # outside the lock, for which `note` must not wait long
        status = replace(status, servers=tuple(map(shown, self.urls())))
        # renamed, so that `top` never reads half a file
        temporary = self._path.with_name(f".{self._path.name}")
        try:
            # not `asdict`: its deep copy takes 30 ms for 4,096 ranks, in which no other thread runs
            content = vars(status) | {"schema": SCHEMA, "ranks": [vars(rank) for rank in ranks]}
            content["metrics"] = strict(status.metrics)
            temporary.write_text(json.dumps(content))
            temporary.replace(self._path)
        except OSError as error:  # a full disk: the file is for people, and its age shows
            self.failures += 1
            if self.failures == 1:
                logger.warning(
                    "%s cannot be written, megatron-rl top will show an old state: %s",
                    self._path,
                    error,
                )

    def _silence(self, rank: int, beat: Beat) -> float:
        """Return the seconds from the last change of this rank's count to the last reading."""
        now = self._read
        count, since = self._last_seen.get(rank, (-1, now))
        if count != beat.count:
            self._last_seen[rank] = beat.count, now
            return 0.0
        return now - since


def read_status(folder: Path) -> Status:
    """Read status.json of a run's folder.  Raises ValueError where there is none of this schema."""
    path = RunFolder(folder).status
    try:
        row = json.loads(path.read_text())
    except FileNotFoundError as error:
        hint = (
            "is it a run's folder? Runs of earlier versions have none"
            if folder.is_dir()
            else "no such folder"
        )
        raise ValueError(f"{path}: not found: {hint}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    schema = row.pop("schema", None) if isinstance(row, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"{path}: schema {schema}, must be {SCHEMA}: use the version of megatron_rl that"
            " wrote it"
        )
    try:
        # earlier versions wrote it; `top` takes no secret's name from a file
        row.pop("api_key_env", None)
        row["ranks"] = [RankStatus(**rank) for rank in row["ranks"]]
        row["metrics"] = {
            name: math.nan if value is None else value for name, value in row["metrics"].items()
        }
        return Status(**row)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a status: {error}") from error


def names(ranks: Collection[int]) -> str:
    """Return the ranks as text: "rank 3", or "ranks 3, 5 to 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}"
