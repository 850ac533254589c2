"""Ranks that greet one another: who came, round trips, bandwidth, clocks.  Under torchrun, or with two started here.

Rank 0 reports.  A roll call in the store comes first and names ranks that do not come; collectives hang without naming anybody.
Shapes: W ranks; a payload is float32 [n].
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
from typing import Any

from megatron_rl.tools.doctor.check import Check
from megatron_rl.tools.doctor.check_machine import count_gpus

PAYLOAD = 4 << 20  # elements, 16 MiB
REPEATS = 5
PINGS = 10
MOST_SKEW_SECONDS = 0.5  # ages of heartbeats and files are compared across nodes
SHOWN = 8


@dataclass(frozen=True)
class Peer:
    """What rank 0 measured with another: the fastest round trip in seconds, bytes a second one way, clock ahead in seconds."""

    rank: int
    host: str
    round_trip: float
    bandwidth: float
    skew: float


def check_ranks(deadline: float) -> list[Check]:
    """Greet the ranks that torchrun (or RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) says there are; [] on all ranks but 0.

    `deadline`: seconds until a rank that has not come is missed.
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "FATAL"
    )  # else stack traces in C++ bury the line that says what is wrong
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=deadline + 10 * (rank > 0))  # rank 0's verdict comes after its own deadline
    try:
        shared = dist.TCPStore(address, port, is_master=hosts_store, wait_for_workers=False, timeout=patience)
        store = dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
        missing = roll_call(store, rank, world, deadline)
        if rank == 0:
            store.set("verdict", "incomplete" if missing else "go on")
            time.sleep(1.0 if missing else 0.0)  # the store ends with this rank: let the others read it
        elif store.get("verdict") == b"incomplete":  # waits for rank 0, which says who is missing
            return []
    except dist.DistError as error:
        found = f"rank {rank} cannot reach the store of rank 0 at {address}:{port}: {first_line(error)}"
        return [
            Check(
                "FAIL", "roll call", found, "does that address belong to rank 0, and does a firewall let the port pass?"
            )
        ]
    if missing:
        found = f"{world - len(missing)} of {world} came within {deadline:g} s; missing: {', '.join(map(str, missing[:SHOWN]))}"
        remedy = "see the logs of those ranks; same rendezvous, MASTER_ADDR and network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)?"
        return [Check("FAIL", "roll call", found, remedy)]
    uses_cuda = torch.cuda.is_available()
    if uses_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        checks = [Check("OK", "roll call", f"{world} ranks on {len(set(hosts(store, world)))} host(s)")]
        for backend in ("gloo", "nccl") if uses_cuda else ("gloo",):
            own = dist.PrefixStore(backend, store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=patience)
            device = torch.device("cuda" if backend == "nccl" else "cpu")
            checks += measure(backend, device, rank, world, hosts(store, world))
            dist.destroy_process_group()
    except (RuntimeError, dist.DistError) as error:
        remedy = "all ranks came, so the address is right: see GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and NCCL_DEBUG=INFO"
        return [Check("FAIL", f"rank {rank}", first_line(error), remedy)]
    roll_call(store, rank, world, deadline, "done")  # rank 0 holds the store: it leaves last
    return checks if rank == 0 else []


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def roll_call(store: Any, rank: int, world: int, deadline: float, word: str = "here") -> list[int]:
    """Say that this rank is here; rank 0 waits until all have.  Returns those that did not come in time, [] on other ranks."""
    store.set(f"{word}/{rank}", socket.gethostname())
    if rank:
        return []
    end = time.monotonic() + deadline
    missing = list(range(world))
    while missing and time.monotonic() < end:
        missing = [other for other in missing if not store.check([f"{word}/{other}"])]
        if missing:
            time.sleep(0.2)
    return missing


def hosts(store: Any, world: int) -> list[str]:
    return [store.get(f"here/{rank}").decode() for rank in range(world)]


def measure(backend: str, device: Any, rank: int, world: int, names: list[str]) -> list[Check]:
    """All-reduces of all, then rank 0 with each other rank.  Collective; [] on all ranks but 0."""
    small, large = all_reduce_seconds(device, 1), all_reduce_seconds(device, PAYLOAD)
    bus = 2 * (world - 1) / world * PAYLOAD * 4 / large  # bytes that every rank sends and receives
    checks = [
        Check(
            "OK",
            f"{backend} all-reduce",
            f"{1e3 * small:.2f} ms for a number, {bus / 1e9:.2f} GB/s for {PAYLOAD >> 18} MiB",
        )
    ]
    peers = [peer for other in range(1, world) if (peer := ping(device, rank, other, names[other])) is not None]
    return (
        [*checks, *judge_peers(backend, peers), *([judge_clocks(peers)] if backend == "gloo" else [])] if peers else []
    )


def timed(action: Callable[[], object], device: Any) -> float:
    """Seconds of `action`, the device's work included."""
    import torch

    start = time.monotonic()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - start


def all_reduce_seconds(device: Any, elements: int) -> float:
    """Median over REPEATS, after one to warm up."""
    import torch
    import torch.distributed as dist

    payload = torch.ones(elements, device=device)
    return statistics.median([timed(lambda: dist.all_reduce(payload), device) for _ in range(REPEATS + 1)][1:])


def ping(device: Any, rank: int, other: int, host: str) -> Peer | None:
    """Rank 0 and `other` send one another a number that is the other's clock, and a payload.  A Peer on rank 0, else None."""
    import torch
    import torch.distributed as dist

    if rank not in (0, other):
        return None
    clock, payload = torch.zeros(1, dtype=torch.float64, device=device), torch.ones(PAYLOAD, device=device)
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
        timed(lambda: dist.send(payload, other) if rank == 0 else dist.recv(payload, 0), device) for _ in range(3)
    ]
    if rank == 0:
        dist.recv(clock, other)  # the last payload has arrived, too
        trip, skew = min(trips)  # the quickest exchange tells most about the clock
        return Peer(other, host, trip, PAYLOAD * 4 / max(min(seconds), 1e-9), skew)
    dist.send(clock, 0)
    return None


def judge_peers(backend: str, peers: list[Peer]) -> Iterator[Check]:
    """One line, and one for each peer that is three times slower than the median."""
    trip, speed = statistics.median(p.round_trip for p in peers), statistics.median(p.bandwidth for p in peers)
    found = f"{len(peers)} peer(s) of rank 0: {1e3 * trip:.2f} ms there and back, {speed / 1e9:.2f} GB/s (medians)"
    yield Check("OK", f"{backend} ping", found)
    slow = [p for p in peers if p.bandwidth < speed / 3 or p.round_trip > max(3 * trip, 1e-3)]
    for peer in slow[:SHOWN]:
        found = f"rank {peer.rank} on {peer.host}: {1e3 * peer.round_trip:.2f} ms, {peer.bandwidth / 1e9:.2f} GB/s"
        yield Check(
            "WARN", f"{backend} slow peer", found, "all ranks wait for it: look at that node's network and load"
        )


def judge_clocks(peers: list[Peer]) -> Check:
    worst = max(peers, key=lambda peer: abs(peer.skew))
    found = f"at most {1e3 * abs(worst.skew):.1f} ms apart from rank 0's (rank {worst.rank} on {worst.host})"
    if abs(worst.skew) > MOST_SKEW_SECONDS:
        return Check("WARN", "clocks", found, "logs will not fit together: run NTP or chrony on every node")
    return Check("OK", "clocks", found)


# Two ranks on this machine ------------------------------------------------------------------------------------------


def check_local_ranks(deadline: float, world: int = 2) -> list[Check]:
    """Start `world` ranks here that greet one another over gloo, or nccl where there are as many GPUs."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    unwanted = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if count_gpus() < world:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        "-m",
        "megatron_rl.tools.doctor.doctor",
        "--ranks",
        "--json",
        "--deadline",
        str(deadline),
    ]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(world)
    ]
    try:
        answers = [rank.communicate(timeout=4 * deadline + 60) for rank in ranks]
    except subprocess.TimeoutExpired:
        return [Check("FAIL", "ranks", f"not done after {4 * deadline + 60:g} s", "is this machine overloaded?")]
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    checks = [Check(**check) for out, _ in answers for section in sections(out) for check in section["checks"]]
    broken = [(rank, answer[1]) for rank, answer in enumerate(answers) if not sections(answer[0])]
    lost = [
        Check("FAIL", f"rank {rank}", err.strip()[-300:] or "said nothing", "can torch be imported?")
        for rank, err in broken
    ]
    return [*checks, *lost]


def sections(out: str) -> list[dict[str, Any]]:
    """The sections of another doctor's --json; [] where it printed none."""
    try:
        return list(json.loads(out)["sections"])
    except (ValueError, KeyError, TypeError):
        return []
