"""Services that every part of a run reports to; started before the model is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.launch.status import StatusWriter
from megatron_rl.launch.trace import Trace
from megatron_rl.launch.watchdog import Watchdog, WatchSettings
from megatron_rl.metrics.console import Console
from megatron_rl.rollout.inference import Inference
from megatron_rl.trainer.recording.events_and_files import Recording, start_recording
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.step_trace import StepTrace


@dataclass(frozen=True)
class RunServices:
    """The services of this rank, which the parts of the run share."""

    status: StatusWriter | None
    """Writer of status.json; None on all ranks but 0."""
    watchdog: Watchdog
    console: Console
    """Silent on all ranks but 0."""
    recording: Recording
    step_trace: StepTrace
    meter: StepMeter
    """Metric sums and times of the step; notifies the watchdog, records into `trace`."""

    @property
    def trace(self) -> Trace:
        """The trace that all parts of the run record into."""
        return self.step_trace.trace

    def watch(self, inference: Inference) -> None:
        """Let the watchdog name the servers that this rank waits for, and status.json those that
        are sampled from.
        """
        self.watchdog.waiting_for = inference.waiting_for
        if self.status is not None:
            self.status.urls = partial(getattr, inference, "urls")  # a push may change them


def start_services(
    cfg: Config, parallel: Parallel, lines: LogLines, stack: ExitStack
) -> RunServices:
    """Start the services of this rank; `stack` stops them in reverse order."""
    status = stack.enter_context(make_status(cfg)) if parallel.rank == 0 else None
    watchdog = stack.enter_context(make_watchdog(cfg, parallel, lines, status))
    # the watchdog first: files that hang at the end of a run are a stall, too
    recording = start_recording(cfg, parallel, stack)
    step_trace = stack.enter_context(StepTrace(cfg, parallel, recording.files))
    return RunServices(
        status=status,
        watchdog=watchdog,
        console=Console(enabled=parallel.rank == 0, lines=lines),
        recording=recording,
        step_trace=step_trace,
        meter=StepMeter(watchdog, step_trace.trace),
    )


def make_status(cfg: Config) -> StatusWriter:
    """Return the writer of status.json, for rank 0."""
    return StatusWriter(
        cfg.run_dir,
        cfg.run.num_steps,
        hidden=cfg.key_variables,
        stopped=(StoppedBySignal,),
    )


def make_watchdog(
    cfg: Config,
    parallel: Parallel,
    lines: LogLines | None = None,
    status: StatusWriter | None = None,
) -> Watchdog:
    """Return the watchdog, which names the rank that the others wait for.

    Its limit for a stage is shorter than the timeout of collectives, whose error names no rank.
    """
    # agreed: all ranks end with this exception, so it is no failure of one rank
    settings = WatchSettings(
        cfg.stage_seconds, cfg.run.silence_timeout_seconds, cfg.run_dir, agreed=(StoppedBySignal,)
    )
    watchdog = Watchdog(parallel.store(), parallel.rank, parallel.world_size, settings, lines=lines)
    if status is not None:
        # status.json gets every heartbeat, and "failed" before the watchdog ends the process
        watchdog.on_heartbeats, watchdog.on_verdict = status.beats, partial(status.close, "failed")
    return watchdog
