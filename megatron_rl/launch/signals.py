"""SIGTERM and SIGUSR1 ask a run to save and stop: it does so between two stages of a step, within checkpoint.grace_seconds.

The signal is noticed by a thread of its own, also while the main thread waits inside a collective.  Nothing is decided by one
rank: the ranks ask each other at the places where they can stop (`Trainer.stop_if_signalled`).  When the grace is
over, for instance
because a peer hangs, the process ends there and then; the last complete checkpoint is what a restart finds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from megatron_rl.launch.exit_codes import REQUEUE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1


class StoppedBySignal(RuntimeError):
    """A signal ended the run, which is saved; main exits with REQUEUE."""


class StopSignal:
    """Use as a context manager in the main thread; `name` is the signal that came, None while none has.

    Until `hold` there is nothing to save: a signal interrupts what the main thread does, and StoppedBySignal leaves the context.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.name: str | None = None
        self._is_held = self._has_interrupted = False
        self._on_signal: Callable[[], None] = lambda: None
        self._done = threading.Event()
        self._read, self._write = os.pipe()

    def __enter__(self) -> StopSignal:
        os.set_blocking(self._write, False)
        self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="stop-signal")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)
        self._done.set()
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)
        if kind is KeyboardInterrupt and self._has_interrupted:
            raise StoppedBySignal("stopped by a signal before the first step: nothing had been trained") from None

    def hold(self, on_signal: Callable[[], None] = lambda: None) -> None:
        """From now on a signal is only noted, in `name`.  on_signal: called behind that, on another thread, once: ends what would
        take longer than the grace."""
        self._on_signal = on_signal
        self._is_held = True

    def _handle(self, number: int, frame: object) -> None:
        if not self._is_held:
            self._has_interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Runs beside the run: bytes are numbers of signals that came."""
        while numbers := os.read(self._read, 64):
            came = [signal.Signals(number) for number in numbers if number in SIGNALS]
            if came and self.name is None:
                self.name = came[0].name
                threading.Thread(target=self._end_after_grace, daemon=True, name="grace").start()
                self._on_signal()

    def _end_after_grace(self) -> None:
        started = time.monotonic()
        if not self._done.wait(self.grace_seconds):
            print(
                f"rank {os.environ.get('RANK', 0)}: {self.name}: not saved {time.monotonic() - started:.0f} s after the signal "
                "(checkpoint.grace_seconds); a restart goes on from the last complete checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(REQUEUE)


def follow_launcher() -> None:
    """Under torchrun: SIGTERM when it dies, even by SIGKILL.  Ranks that nobody looks after would keep their GPUs."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
