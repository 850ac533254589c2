"""torchrun that returns the ranks' exit status, and does not restart ranks that ended on purpose.

torchrun itself exits with 1 whatever its ranks exit with, restarts ranks that were preempted or
whose configuration is invalid, and reuses the store of the failed attempt.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from megatron_rl.launch.exit_codes import BAD_CONFIG, INTERRUPTED, REQUEUE
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.signals import LAUNCHER, SIGNALS

ON_PURPOSE = (BAD_CONFIG, REQUEUE, INTERRUPTED)
"""Statuses after which a restart would not help, or is the scheduler's job."""

STUCK_SECONDS = 30.0
"""Time for a request to the rendezvous, which normally takes milliseconds."""

SAVE_SECONDS = 3600.0
"""Time for ranks that save after a signal; checkpoint.grace_seconds ends them earlier.

torchrun itself kills them after 30 s.
"""

LAST_SECONDS = 60.0
"""Time for the other ranks once the first one has ended.

They save together, and one that is stopped would never end.
"""


class Agent(LocalElasticAgent):
    """torchrun's agent: starts, watches and restarts the ranks of this node.

    `codes` are the ranks' exit statuses in the last attempt.  While the ranks run, the agent asks
    the rendezvous for new nodes.  Where the network of its node is down that call never returns;
    then this process exits once its ranks have.
    """

    def __init__(self, *args: Any, codes: list[int], lines: LogLines, **options: Any) -> None:
        super().__init__(*args, **options)
        self._codes, self._lines = codes, lines
        self._asks_since: float | None = None
        threading.Thread(target=self._leave_when_stuck, name="stuck", daemon=True).start()

    def _leave_when_stuck(self) -> None:
        while True:
            time.sleep(1)
            # both change in the main thread
            since, context = self._asks_since, self._pcontext
            if (
                since is None
                or not isinstance(context, SubprocessContext)
                or time.monotonic() - since < STUCK_SECONDS
            ):
                continue
            if all(
                handler.proc.poll() is not None for handler in context.subprocess_handlers.values()
            ):
                # the main thread is stuck in its call, so this one ends the process
                self._shutdown()
                cause = "the rendezvous does not answer"
                os._exit(ended_ranks(self._lines, cause, first_of(self._codes)))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._asks_since = time.monotonic() if result.state == WorkerState.HEALTHY else None
        if result.is_failed():
            failures = sorted(result.failures.values(), key=lambda failure: failure.timestamp)
            self._codes[:] = [failure.exitcode for failure in failures]
            if self._codes and self._codes[0] in ON_PURPOSE:
                self._remaining_restarts = 0  # torchrun has no list of codes that are final
        return result

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._asks_since = None
        context = self._pcontext
        if args and args[0] in SIGNALS and isinstance(context, SubprocessContext):
            # A launcher of jobs may send a second signal.  It would end the wait, and torchrun
            # would kill ranks that save.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            # before torchrun's own shutdown, which kills after 30 s
            let_save(args[0], list(context.subprocess_handlers.values()))
        super()._shutdown(*args, **options)
        # a signal to this process, where no rank had failed
        if not self._codes and isinstance(context, SubprocessContext):
            self._codes[:] = [
                handler.proc.poll() or 0 for handler in context.subprocess_handlers.values()
            ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._codes.clear()  # of the previous attempt
        return super()._start_workers(worker_group)


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun.

    Return 0, or the exit status of the rank that failed first (128 + n where signal n killed it).
    """
    options = sys.argv[1:] if argv is None else list(argv)
    # a new store for every attempt, at rank 0: torchrun's own keeps what dead ranks wrote, and a
    # node that joins after a restart does not get its address
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHER] = "1"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end_process)  # until torchrun's own handlers pass it to the ranks
    codes: list[int] = []
    parser = run.get_args_parser()
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    arguments = parser.parse_args(options)
    lines = LogLines(arguments.log_format)
    # torchrun has no option for the agent's class; it only calls it
    agent: Any = partial(Agent, codes=codes, lines=lines)
    api.LocalElasticAgent = agent  # type: ignore[misc]
    try:
        run.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return ended_ranks(lines, f"rank {rank} ended first", status_of(failure.exitcode))
    except SignalException as error:
        return ended_ranks(lines, error.sigval.name, first_of(codes) if codes else REQUEUE)
    except DistNetworkError as error:
        if errno.errorcode[errno.EADDRINUSE] not in str(error):
            raise
        address = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
        cause = (
            f"--master-port: another program, such as another run, listens on {address}; set"
            " another --master-port (train.sh: MASTER_PORT), or on one node --standalone, which"
            " takes a free one"
        )
        return ended_ranks(lines, cause, 1)
    # after a restart another node, or that of the rendezvous, is missing
    except RendezvousError as error:
        cause = f"{type(error).__name__}: {error.__cause__ or error}".strip(": ")
        hint = "is train.sh started on every node, with one JOB_ID and MASTER_ADDR?"
        return ended_ranks(
            lines, f"the nodes did not find each other ({cause}); {hint}", first_of(codes) or 1
        )
    return 0


def let_save(number: signal.Signals, handlers: Sequence[SubprocessHandler]) -> None:
    """Pass the signal to the ranks and wait until they have saved and ended, or time is over."""
    for handler in handlers:
        if handler.proc.poll() is None:
            handler.close(number)
    until = time.monotonic() + SAVE_SECONDS
    while (
        running := sum(handler.proc.poll() is None for handler in handlers)
    ) and time.monotonic() < until:
        if running < len(handlers):
            until = min(until, time.monotonic() + LAST_SECONDS)
        time.sleep(0.1)


def end_process(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def first_of(codes: Sequence[int]) -> int:
    """Return one status for all ranks: that of the first failure.

    Without a failure it is REQUEUE where some ranks saved, else 0.
    """
    failures = [code for code in codes if code not in (0, REQUEUE)]
    return status_of(failures[0]) if failures else max(codes, default=0)  # REQUEUE > 0


def status_of(code: int) -> int:
    """Return the status as a shell reports it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def ended_ranks(lines: LogLines, cause: str, status: int) -> int:
    text = f"megatron_rl.launch.torchrun, {socket.gethostname()}: {cause}; exit status {status}"
    lines.print_error(text, error="RanksEnded", exit_status=status)
    return status
