"""The events of a run (events.jsonl), and the thread that writes tensors of rollouts and tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice, Recorder
from megatron_rl.trainer.step_meter import StepMeter

logger = logging.getLogger(__name__)


@dataclass
class Recording:
    """The files that this rank writes beside the metrics."""

    files: FileWriter
    """Writes files in a thread, and counts those that could not be written."""
    events: Events
    """Writes events.jsonl, on rank 0 only."""
    reason: str = "finished"
    """Why the run ends, where no error ends it."""

    def recorder(self, cfg: Config, parallel: Parallel) -> Recorder:
        """Return the writer of this replica's rollouts."""
        choice = GroupChoice(
            cfg.rollout.saved_share, cfg.run.seed, parallel.dp_rank, parallel.dp_size
        )
        hidden = cfg.key_variables
        return Recorder(
            cfg.run_dir,
            dp_rank=parallel.dp_rank,
            save_tensors=choice,
            files=self.files,
            hidden=hidden,
        )

    @contextmanager
    def run(self, first_step: int, meter: StepMeter, *, is_new: bool) -> Iterator[None]:
        """Add an event where the run starts or continues, and one with the reason where it ends."""
        if is_new:
            self.events.add("start", first_step, "")
        else:
            self.events.add("resume", first_step, f"after step {first_step}")
        try:
            yield
        except BaseException as error:  # signals and interrupts are reasons, too
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.events.add("stop", meter.step + 1, reason)
            raise
        self.events.add("stop", meter.step + 1, self.reason)


def start_recording(cfg: Config, parallel: Parallel, stack: ExitStack) -> Recording:
    """Start the thread that writes files; `stack` ends it when everything is written."""
    files = FileWriter(logger.warning)
    stack.callback(files.close)
    path = RunFolder(cfg.run_dir).events if parallel.rank == 0 else None
    return Recording(files, Events(path, files, hidden=cfg.key_variables))
