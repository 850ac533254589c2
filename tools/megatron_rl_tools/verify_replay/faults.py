"""Faults that are injected into a rank's routes, after cutting and validation, where a real bug
would have its effect.

Shapes: l this rank's MoE layers, t its rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rl.replay.manager import ReplayManager, ReplayPass, Routes


class FaultInjector:
    """Wraps manager.run_pass on one rank and breaks the routes that it is about to replay.

    step: distance in rows between successive positions of a sequence.
    """

    def __init__(self, manager: ReplayManager, fault: str, step: int = 1) -> None:
        self.fault = fault
        self.step = step
        self.pads: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.previous: list[Tensor] = []  # routes that the previous round replayed
        self._current: list[Tensor] = []
        self._run_pass = manager.run_pass
        manager.run_pass = self.run_pass  # type: ignore[method-assign,assignment]

    def start_round(self, pads: list[list[int]], tokens: list[list[int]]) -> None:
        """Set the rows of each micro-batch that are pads, and those that have a route."""
        self.pads, self.tokens = pads, tokens
        self.previous, self._current = self._current, []

    def run_pass(
        self, routes: Sequence[Routes], **settings: Any
    ) -> AbstractContextManager[ReplayPass]:
        tables = [route.replay for route in routes if route.replay is not None]
        if tables:
            self._current = [table.clone() for table in tables]
            broken = self.break_tables([table.clone() for table in tables])
            routes = [
                replace(route, replay=table) for route, table in zip(routes, broken, strict=True)
            ]
        return self._run_pass(routes, **settings)

    def break_tables(self, tables: list[Tensor]) -> list[Tensor]:
        """Return broken tables, [l, t, K] per micro-batch; they may be changed in place."""
        first = tables[0]
        match self.fault:
            case "offset":
                return [table.roll(self.step, dims=1) for table in tables]
            case "layer":
                return [table[[1, 0, *range(2, len(table))]] for table in tables]
            case "order":
                return [tables[1], tables[0], *tables[2:]]
            case "stale":
                return self.previous or tables
            case "duplicate":
                row = self.tokens[0][0]
                first[0, row, 1] = first[0, row, 0]
            case "pad":
                for table, pads, tokens in zip(tables, self.pads, self.tokens, strict=True):
                    if pads and tokens:
                        table[:, pads] = table[:, pads[:1]]  # all pads use the same experts
                        table[:, tokens[0]] = table[:, pads[0]]
        return tables


def has_room(
    fault: str, manager: ReplayManager, pads: list[list[int]], tokens: list[list[int]]
) -> bool:
    """Return whether the fault can be injected into this rank's routes."""
    if fault == "layer":
        return len(manager.layers) > 1
    if fault == "order":
        return len(tokens) > 1
    return bool(manager.layers) and len(tokens[0]) > 1 and (fault != "pad" or len(pads[0]) > 1)
