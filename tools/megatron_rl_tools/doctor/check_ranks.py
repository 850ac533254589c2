"""Checks of the connections between ranks: missing ranks, round trips, bandwidth, clocks; under
torchrun, or with two ranks that are started here.

Rank 0 reports.  A roll call in the store comes first and names missing ranks, because collectives
would hang without naming one.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_rl_tools.doctor.check import Check, warn_if
from megatron_rl_tools.doctor.check_machine import count_gpus

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

PAYLOAD = 4 << 20
"""Elements of float32, 16 MiB."""
REPEATS = 5
PINGS = 10
MOST_SKEW_SECONDS = 0.5
"""The most by which clocks may differ: ages of heartbeats and files are compared across nodes."""
SHOWN = 8
"""The most ranks that a check names."""


@dataclass(frozen=True)
class Peer:
    """Rank 0's measurements with another rank."""

    rank: int
    host: str
    round_trip: float
    """Fastest round trip, in seconds."""
    bandwidth: float
    """Bytes per second one way."""
    skew: float
    """Seconds by which its clock is ahead."""


def check_ranks(deadline: float) -> list[Check]:
    """Connect to the ranks of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Returns [] on all ranks but 0, unless they fail.  deadline: seconds until a rank is missing.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else C++ stack traces hide the error
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=deadline + 10 * (rank > 0))  # others wait for rank 0's result
    try:
        shared = dist.TCPStore(
            address, port, is_master=hosts_store, wait_for_workers=False, timeout=patience
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"doctor/{restart}", shared)
        missing = roll_call(store, rank, world, deadline)
        if rank == 0:
            store.set("roll_call", "incomplete" if missing else "complete")
            # the store ends with this process: let the others read it
            time.sleep(1.0 if missing else 0.0)
        # waits for rank 0, which reports the missing ranks
        elif store.get("roll_call") == b"incomplete":
            return []
    except dist.DistError as error:
        place = f"{address}:{port}: {first_line_of(error)}"
        result = f"rank {rank} cannot reach the store of rank 0 at {place}"
        remedy = "does that address belong to rank 0, and does a firewall block the port?"
        return [Check("FAIL", "roll call", result, remedy)]
    if missing:
        return [missing_ranks(missing, world, deadline)]
    backends = ["gloo"]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backends.append("nccl")
    try:
        checks = check_backends(backends, store, rank, world, patience)
    except (RuntimeError, dist.DistError) as error:
        remedy = (
            "the roll call worked, so the address is right: see GLOO_SOCKET_IFNAME,"
            " NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO"
        )
        return [Check("FAIL", f"rank {rank}", first_line_of(error), remedy)]
    roll_call(store, rank, world, deadline, "done")  # rank 0 has the store: it leaves last
    return checks if rank == 0 else []


def missing_ranks(missing: list[int], world: int, deadline: float) -> Check:
    absent = ", ".join(map(str, missing[:SHOWN]))
    connected = f"{world - len(missing)} of {world} connected within {deadline:g} s"
    remedy = (
        "see the logs of those ranks; same rendezvous, MASTER_ADDR and network"
        " (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)?"
    )
    return Check("FAIL", "roll call", f"{connected}; missing: {absent}", remedy)


def check_backends(
    backends: list[str], store: Store, rank: int, world: int, patience: timedelta
) -> list[Check]:
    """Measure all ranks over each backend.  Collective."""
    import torch
    import torch.distributed as dist

    names = hosts(store, world)
    checks = [Check("OK", "roll call", f"{world} ranks on {len(set(names))} host(s)")]
    for backend in backends:
        part = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=part, rank=rank, world_size=world, timeout=patience)
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        checks += measure_ranks(backend, device, rank, names)
        dist.destroy_process_group()
    return checks


def first_line_of(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def roll_call(store: Store, rank: int, world: int, deadline: float, key: str = "here") -> list[int]:
    """Register this rank; rank 0 waits for all.

    Returns the ranks that are missing at the deadline on rank 0, [] on other ranks.
    """
    store.set(f"{key}/{rank}", socket.gethostname())
    if rank:
        return []
    end = time.monotonic() + deadline
    while missing := [other for other in range(world) if not store.check([f"{key}/{other}"])]:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return missing


def hosts(store: Store, world: int) -> list[str]:
    return [store.get(f"here/{rank}").decode() for rank in range(world)]


def measure_ranks(backend: str, device: torch.device, rank: int, names: list[str]) -> list[Check]:
    """Measure an all-reduce over all ranks, then rank 0 with each other rank.  Collective.

    names: hosts of the ranks.
    """
    world = len(names)
    small, large = all_reduce_seconds(device, 1), all_reduce_seconds(device, PAYLOAD)
    bus = 2 * (world - 1) / world * PAYLOAD * 4 / large  # bytes that every rank sends and receives
    result = f"{1e3 * small:.2f} ms for a number, {bus / 1e9:.2f} GB/s for {PAYLOAD >> 18} MiB"
    checks = [Check("OK", f"{backend} all-reduce", result)]
    pings = [ping(device, rank, other, names[other]) for other in range(1, world)]
    peers = [peer for peer in pings if peer is not None]
    if not peers:
        return []
    clocks = [check_clocks(peers)] if backend == "gloo" else []
    return [*checks, *check_peers(backend, peers), *clocks]


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `action`, including the device's work."""
    import torch

    start = time.monotonic()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - start


def all_reduce_seconds(device: torch.device, elements: int) -> float:
    """Return the median over REPEATS, after one warm-up."""
    import torch
    import torch.distributed as dist

    payload = torch.ones(elements, device=device)
    seconds = [timed(lambda: dist.all_reduce(payload), device) for _ in range(REPEATS + 1)]
    return statistics.median(seconds[1:])


def ping(device: torch.device, rank: int, other: int, host: str) -> Peer | None:
    """Read the clock of `other` on rank 0, and send it a payload.

    Returns a Peer on rank 0, None on other ranks.
    """
    import torch
    import torch.distributed as dist

    if rank not in (0, other):
        return None
    clock = torch.zeros(1, dtype=torch.float64, device=device)
    payload = torch.ones(PAYLOAD, device=device)
    trips: list[tuple[float, float]] = []
    for _ in range(PINGS):
        if rank == 0:
            before, start = time.time(), time.monotonic()
            dist.send(clock, other)
            dist.recv(clock, other)
            theirs, trip = clock.item(), time.monotonic() - start
            trips.append((trip, theirs - (before + trip / 2)))
        else:
            dist.recv(clock, 0)
            dist.send(clock.fill_(time.time()), 0)
    seconds = [
        timed(lambda: dist.send(payload, other) if rank == 0 else dist.recv(payload, 0), device)
        for _ in range(3)
    ]
    if rank == 0:
        dist.recv(clock, other)  # after the last payload arrived
        trip, skew = min(trips)  # the fastest exchange has the smallest error of the clock
        return Peer(other, host, trip, PAYLOAD * 4 / max(min(seconds), 1e-9), skew)
    dist.send(clock, 0)
    return None


def check_peers(backend: str, peers: list[Peer]) -> Iterator[Check]:
    """Yield a check of all peers, and one for each that is three times slower than the median."""
    trip = statistics.median(peer.round_trip for peer in peers)
    speed = statistics.median(peer.bandwidth for peer in peers)
    result = (
        f"{len(peers)} peer(s) of rank 0: {1e3 * trip:.2f} ms there and back, {speed / 1e9:.2f}"
        " GB/s (medians)"
    )
    yield Check("OK", f"{backend} ping", result)
    slow = [p for p in peers if p.bandwidth < speed / 3 or p.round_trip > max(3 * trip, 1e-3)]
    for peer in slow[:SHOWN]:
        result = (
            f"rank {peer.rank} on {peer.host}: {1e3 * peer.round_trip:.2f} ms,"
            f" {peer.bandwidth / 1e9:.2f} GB/s"
        )
        remedy = "all ranks wait for it: check that node's network and load"
        yield Check("WARN", f"{backend} slow peer", result, remedy)


def check_clocks(peers: list[Peer]) -> Check:
    worst = max(peers, key=lambda peer: abs(peer.skew))
    result = (
        f"at most {1e3 * abs(worst.skew):.1f} ms apart from rank 0's (rank {worst.rank} on"
        f" {worst.host})"
    )
    remedy = "timestamps of logs will not match: run NTP or chrony on every node"
    return warn_if(abs(worst.skew) > MOST_SKEW_SECONDS, "clocks", result, remedy)


# Two ranks on this machine ------------------------------------------------------------------------


def check_local_ranks(deadline: float) -> list[Check]:
    """Start two ranks here that connect over gloo, and over nccl if there are two GPUs."""
    world = 2
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    of_torchrun = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(of_torchrun)}
    env |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if count_gpus() < world:
        env["CUDA_VISIBLE_DEVICES"] = ""
    module = "megatron_rl_tools.doctor.doctor"
    command = [sys.executable, "-m", module, "--ranks", "--json", "--deadline", str(deadline)]
    ranks = [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        answers = [rank.communicate(timeout=4 * deadline + 60) for rank in ranks]
    except subprocess.TimeoutExpired:
        result = f"not done after {4 * deadline + 60:g} s"
        return [Check("FAIL", "ranks", result, "is this machine overloaded?")]
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    checks = []
    for rank, (out, errors) in enumerate(answers):
        try:
            sections = json.loads(out)["sections"]
            checks += [Check(**check) for section in sections for check in section["checks"]]
        except (ValueError, KeyError, TypeError):  # it died before it printed its report
            result = errors.strip()[-300:] or "printed nothing"
            checks.append(Check("FAIL", f"rank {rank}", result, "can torch be imported?"))
    return checks
