"""Compares the collectives of the virtual ranks and passes on the values that some of them carry.

Every rank is a process with a pipe to this one.  A large tensor's call is only compared; the rank
does not wait.  A rank that needs values waits until all rehearsed ranks of the group have called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_rl_tools.rehearse.calls import POINT_TO_POINT, Call, disagreement


class Disagreement(Exception):
    """Two ranks' collectives do not fit; the message names both and both lines."""


@dataclass(frozen=True)
class RankFailed:
    """An error in one rank's program."""

    rank: int
    error: str
    """One line: the class and its message."""
    trace: str


@dataclass
class Rendezvous:
    """The calls that belong together, as they arrive."""

    calls: dict[int, Call] = field(default_factory=dict)


@dataclass
class Switchboard:
    """pipes: rank -> its pipe, for every rank that is rehearsed."""

    pipes: Mapping[int, Connection]
    open: dict[Any, Rendezvous] = field(default_factory=lambda: defaultdict(Rendezvous))
    """Calls that some rehearsed ranks of the group have not made yet."""
    unanswered: dict[tuple[int, int], Call] = field(default_factory=dict)
    """(rank, index of the call) -> a call whose values the rank wants."""
    waits_in: dict[int, Call] = field(default_factory=dict)
    """Rank -> the call in which it waits for others."""
    last: dict[int, Call] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    """Rank -> what its program returned; None where its process died."""
    dead: set[int] = field(default_factory=set)
    """Ranks whose process died."""

    def serve(self) -> dict[int, Any]:
        """Answer until every rank has ended, or waits for one that failed or died; return rank ->
        result.

        Raises Disagreement for the first calls that do not fit, and where no rank can continue.
        """
        ranks = {id(pipe): rank for rank, pipe in self.pipes.items()}
        running = dict(self.pipes)
        while running:
            for pipe in wait(list(running.values())):
                rank = ranks[id(pipe)]
                try:
                    message = self.pipes[rank].recv()
                except (EOFError, OSError):  # OSError: within a message
                    message = ("result", None)
                    self.dead.add(rank)
                if isinstance(message, Call):
                    self._take(message)
                elif isinstance(message, int):  # it waits for a receive that it began before
                    if (call := self.unanswered.get((rank, message))) is not None:
                        self.waits_in[rank] = call
                else:
                    self.results[rank] = message[1]
                    self.waits_in.pop(rank, None)  # a process that died while it waited
                    del running[rank]
            if running and all(rank in self.waits_in for rank in running):
                if self._has_failed():
                    return self.results
                raise Disagreement(self._stuck())
        if not self._has_failed():
            for meeting in self.open.values():
                raise Disagreement(self._missing(meeting))
        return self.results

    def _has_failed(self) -> bool:
        """Return whether a rank's error or death is why it did not make the calls of others."""
        has_error = any(isinstance(result, RankFailed) for result in self.results.values())
        return has_error or bool(self.dead)

    def _take(self, call: Call) -> None:
        self.last[call.rank] = call
        meeting = self.open[call.key]
        for other in meeting.calls.values():
            if what := disagreement(other, call):
                raise Disagreement(f"{what} differ:\n  {other}\n  {call}")
        meeting.calls[call.rank] = call
        if call.wants_values:
            self.unanswered[call.rank, call.index] = call
            if call.operation != "recv":
                self.waits_in[call.rank] = call
        if meeting.calls.keys() >= self._expected(call):
            values = {rank: other.values for rank, other in meeting.calls.items()}
            for rank, other in meeting.calls.items():
                if self.unanswered.pop((rank, other.index), None) is not None:
                    if self.waits_in.get(rank) is other:
                        del self.waits_in[rank]
                    # of a rank that has died `serve` reads the end of its pipe
                    with suppress(BrokenPipeError):
                        self.pipes[rank].send((other.index, values))
            del self.open[call.key]

    def _expected(self, call: Call) -> set[int]:
        """Return the rehearsed ranks that take part."""
        ranks = call.group[1]
        if call.operation in POINT_TO_POINT:
            ranks = (call.rank, ranks[call.root])
        return set(ranks) & self.pipes.keys()

    def _missing(self, meeting: Rendezvous) -> str:
        call = next(iter(meeting.calls.values()))
        absent = sorted(self._expected(call) - meeting.calls.keys())
        lines = [f"only some ranks made a call, which would hang:\n  {call}"]
        for rank in absent[:4]:
            if rank in self.waits_in:
                lines.append(f"  not made; it waits in {self.waits_in[rank]}")
            elif rank in self.results:
                after = f", its last call was {self.last[rank]}" if rank in self.last else ""
                lines.append(f"  rank {rank}: not made; it has ended{after}")
            else:
                lines.append(f"  rank {rank}: not made")
        return "\n".join(lines)

    def _stuck(self) -> str:
        call = next(iter(self.waits_in.values()))
        return self._missing(self.open[call.key])
