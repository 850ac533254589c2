"""Hooks on live routers: read the routes they dispatch by, name the owner of each row, and compare
with the given routes.

The hook reads core's own routing map, so that the proof does not depend on what the replay manager
reports.
Shapes: t this rank's rows, E experts, K top-k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.models.spec import RouterKind
from megatron_rl_tools.verify_replay.fingerprints import Key, Owner, Route
from megatron_rl_tools.verify_replay.router_kinds import gate_weights, live_choice

GATE_TOLERANCE = 1e-5
Kind = Literal["forward", "recompute"]


class RouterCall(NamedTuple):
    """One call of a router."""

    layer: int
    kind: Kind
    number: int
    """Number of calls of this kind and layer since the last take(): its micro-batch."""
    consumed: list[Route]
    """Experts in the routing map, row by row."""
    live: list[Route]
    """The router's live choices, row by row."""


class Seen(NamedTuple):
    """One row of a call, with its owner."""

    who: Owner
    layer: int
    kind: Kind
    consumed: Route
    live: Route
    rank: int
    micro_batch: int
    row: int


@dataclass(frozen=True)
class RouteCheck:
    """One line of the result."""

    name: str
    passed: bool
    detail: str
    hint: str = ""
    """The likeliest kind of fault."""


def first_failure(checks: Iterable[RouteCheck]) -> RouteCheck:
    """Return the first check that failed, or the last one."""
    for check in checks:
        if not check.passed:
            break
    return check


class Watch:
    """Forward hooks on routers of one kind, which are (index of the MoE layer, router).

    gate_error: the largest difference so far between core's gate weights and those of the live
    scores at the experts that were used.
    """

    def __init__(self, routers: Sequence[tuple[int, Any]], top_k: int, kind: RouterKind) -> None:
        self.top_k = top_k
        self.kind = kind
        self.gate_error = 0.0
        self._calls: list[RouterCall] = []
        self._counts: Counter[tuple[int, Kind]] = Counter()
        for layer, router in routers:
            router.register_forward_hook(self._hook(layer))

    def take(self) -> list[RouterCall]:
        """Return and forget the calls since the last take."""
        calls, self._calls = self._calls, []
        self._counts.clear()
        return calls

    def _hook(self, layer: int) -> Any:
        def after(
            router: Any,
            inputs: tuple[torch.Tensor, ...],
            outputs: tuple[torch.Tensor, torch.Tensor],
        ) -> Any:
            # a router that runs during the backward is recomputing
            kind: Kind = "forward" if torch._C._current_autograd_node() is None else "recompute"
            probs, routing_map = outputs
            with torch.no_grad():
                logits = router.gating(inputs[0].detach()).view(len(routing_map), -1)
                live = live_choice(logits, self.kind, router.expert_bias, self.top_k)
                weights = gate_weights(logits, routing_map, self.kind)
                if len(probs):
                    difference = (probs - weights).abs().nan_to_num(nan=torch.inf).max()
                    self.gate_error = max(self.gate_error, float(difference))
            consumed: list[list[int]] = [[] for _ in range(len(routing_map))]
            for row, expert in routing_map.nonzero().tolist():
                consumed[row].append(expert)
            number = self._counts[layer, kind]
            self._counts[layer, kind] += 1
            used, chosen = list(map(tuple, consumed)), list(map(tuple, live.tolist()))
            self._calls.append(RouterCall(layer, kind, number, used, chosen))
            if any(len(row) < self.top_k for row in consumed):
                return probs, filled(routing_map, self.top_k)
            return None

        return after


def filled(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the map [t, E] with K experts in every row: those it has, and others whose gate weight
    stays 0.

    With fewer in a row, core's ranks disagree about sizes, and hang or crash before the fault can
    be named.
    """
    chosen = routing_map.to(torch.uint8).topk(top_k, dim=-1).indices
    return torch.zeros_like(routing_map).scatter(1, chosen, True)


def name_wrong_rows(
    calls: Sequence[RouterCall], rows: Sequence[Sequence[Owner]], rank: int
) -> list[Seen]:
    """Give every row of every call its owner; rows: the owners by micro-batch.

    Raises RuntimeError if a router saw another number of rows or of micro-batches than the layout
    has.
    """
    seen = []
    for call in calls:
        if call.number >= len(rows) or len(call.consumed) != len(rows[call.number]):
            raise RuntimeError(
                f"rank {rank}, MoE layer {call.layer}: {call.kind} call {call.number} has"
                f" {len(call.consumed)} rows, the layout has"
                f" {[len(micro_batch) for micro_batch in rows]} in its micro-batches"
            )
        for row, who in enumerate(rows[call.number]):
            route = call.consumed[row]
            seen.append(
                Seen(who, call.layer, call.kind, route, call.live[row], rank, call.number, row)
            )
    return seen


def gather_seen(seen: list[Seen]) -> list[Seen]:
    """Return the rows of all ranks.  Collective."""
    everyone: list[list[Seen]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    return [row for rows in everyone for row in rows]


@dataclass(frozen=True)
class Expected:
    """The routes that a pass must consume, and the data to name a fault."""

    routes: Mapping[Key, Route]
    """The routes of this batch."""
    earlier: Mapping[Key, Route]
    """The routes of the previous batch."""
    places: Mapping[str, tuple[int, int]]
    """Rollout -> (replica, micro-batch)."""
    forwards: Mapping[Route, str] = field(default_factory=dict)
    """Route of another request of the episode -> hint."""
    owners: dict[Route, list[Key]] = field(default_factory=dict)
    """Route of this batch -> all that have it."""
    earlier_routes: set[Route] = field(default_factory=set)

    def __post_init__(self) -> None:
        for key, route in self.routes.items():
            self.owners.setdefault(route, []).append(key)
        self.earlier_routes.update(self.earlier.values())


def check_consumed(
    name: str,
    seen: Sequence[Seen],
    expected: Expected,
    top_k: int,
    layers: Container[int] | None = None,
) -> RouteCheck:
    """Check that every given route was consumed exactly once, and by its owner.

    layers: the MoE layers to check; None for all.
    """
    routes = expected.routes
    if layers is not None:
        routes = {key: route for key, route in routes.items() if key[2] in layers}
    counts: Counter[Key] = Counter()
    wrong = []
    num_live = 0  # routes that are the router's live choice too
    for row in seen:
        if row.who is None:
            continue
        key = (*row.who, row.layer)
        if key in routes:
            counts[key] += 1
            if row.consumed != routes[key]:
                wrong.append((row.who, row))
            num_live += row.live == routes[key]
    if wrong:
        pads = {row.consumed for row in seen if row.who is None}
        votes = Counter(name_fault(*pair, expected, pads, top_k) for pair in wrong)
        (rollout, position), first = min(wrong, key=lambda pair: (pair[0], pair[1].layer))
        return RouteCheck(
            name,
            False,
            f"{len(wrong)} of {len(routes)} wrong; first: rollout {rollout}, position {position},"
            f" MoE layer {first.layer}: given {list(routes[rollout, position, first.layer])},"
            f" consumed {list(first.consumed)} (rank {first.rank}, micro-batch {first.micro_batch},"
            f" row {first.row})",
            hint=votes.most_common(1)[0][0],
        )
    missing = [key for key in routes if counts[key] != 1]
    if missing:
        rollout, position, layer = missing[0]
        return RouteCheck(
            name,
            False,
            f"{len(missing)} of {len(routes)} not consumed exactly once; first: rollout {rollout},"
            f" position {position}, MoE layer {layer}: {counts[missing[0]]} times",
        )
    share = num_live / max(len(routes), 1)
    return RouteCheck(
        name,
        True,
        f"{len(counts)} routes consumed once each; the router alone would agree on {share:.1%}",
    )


def name_fault(
    who: tuple[str, int], row: Seen, expected: Expected, pads: set[Route], top_k: int
) -> str:
    """Return the likeliest reason for a wrong row, from the owner of the route that it consumed."""
    rollout, position = who
    if len(row.consumed) < top_k:
        return "duplicate: an id occurs twice in a row, so fewer than top-k experts ran"
    for other, at, layer in expected.owners.get(row.consumed, []):
        if (other, layer) == (rollout, row.layer):
            return f"offset: tokens used the route of position {at - position:+d}"
        if (other, at) == (rollout, position):
            low, high = sorted((layer, row.layer))
            return f"layer: MoE layers {low} and {high} swapped"
        if layer == row.layer and expected.places[other] == expected.places[rollout]:
            return "offset: routes of another sequence of the same micro-batch"
        if layer == row.layer:
            (replica, first), (its_replica, second) = sorted(
                [expected.places[rollout], expected.places[other]]
            )
            if replica == its_replica:
                return f"order: routes of micro-batches {first} and {second} swapped"
            return f"order: routes of replicas {replica} and {its_replica} swapped"
        return "routes of another token and layer"
    if row.consumed in expected.forwards:
        return f"forward: {expected.forwards[row.consumed]}"
    if row.consumed in expected.earlier_routes:
        return "stale: routes of the previous batch"
    if row.consumed in pads:
        return "pad: a token was routed as a pad"
    if row.consumed == row.live:
        return "not replayed: the router chose for itself"
    return "unknown: ids that no token was given"


def check_gates(name: str, error: float, kind: RouterKind) -> RouteCheck:
    """Check that gate weights are those of the live scores at the consumed experts, so that routers
    get the gradient of their own scores.
    """
    limit = GATE_TOLERANCE * (kind.scaling_factor or 1.0)
    detail = f"largest difference {error:.2g} from the live scores' (limit {limit:.1g})"
    return RouteCheck(name, error <= limit, detail)


def check_live_rows(name: str, seen: Sequence[Seen], expected: Expected) -> RouteCheck:
    """Check that rows without a route, the last tokens of sequences, follow the router."""
    rows = [
        (row.who, row)
        for row in seen
        if row.who is not None and (*row.who, row.layer) not in expected.routes
    ]
    for (rollout, position), row in rows:
        if row.consumed != row.live:
            return RouteCheck(
                name,
                False,
                f"rollout {rollout}, position {position}, MoE layer {row.layer}: the router chose"
                f" {list(row.live)}, consumed {list(row.consumed)} (rank {row.rank})",
            )
    return RouteCheck(name, True, f"{len(rows)} rows without a route followed the router")


def check_pads(
    name: str, seen: Sequence[Seen], top_k: int, num_experts: int, ep_size: int
) -> RouteCheck:
    """Check that each pad uses K distinct experts, and that pads are spread evenly over experts and
    expert-parallel ranks: loads differ by at most one.
    """
    calls: dict[tuple[int, int, int, Kind], list[Seen]] = {}
    for row in seen:
        if row.who is None:
            calls.setdefault((row.rank, row.micro_batch, row.layer, row.kind), []).append(row)
    per_rank = num_experts // ep_size
    for (rank, micro_batch, layer, _), rows in calls.items():
        place = f"rank {rank}, micro-batch {micro_batch}, MoE layer {layer}"
        for row in rows:
            if len(row.consumed) != top_k:
                hint = "duplicate: an id occurs twice in a row"
                return RouteCheck(
                    name, False, f"{place}: pad row {row.row} consumed {list(row.consumed)}", hint
                )
        experts = Counter(expert for row in rows for expert in row.consumed)
        ranks = Counter(expert // per_rank for expert in experts.elements())
        for what, loads, size in (
            ("experts", experts, num_experts),
            ("expert ranks", ranks, ep_size),
        ):
            if max(loads.values()) - min(loads[i] for i in range(size)) > 1:
                return RouteCheck(
                    name,
                    False,
                    f"{place}: {len(rows)} pads load {what} unevenly, {loads.most_common(1)[0]}"
                    " (id, rows)",
                    "pad: pads crowd on the same experts",
                )
    total = sum(len(rows) for rows in calls.values())
    return RouteCheck(
        name, True, f"{total} pad rows, distinct experts, loads within one row of each other"
    )
