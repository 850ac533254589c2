"""Kill a real run of two ranks repeatedly at random times, restart it each time, and check that
nothing is lost:

    python -m tests.kills --kills 60 --seed 0 [--mode continuous | teacher]        (make kills)

One run (ep = 2, R3, a checkpoint after every step, in the background in every second life) on saved
rollouts; or runs with equal parts of the kills that sample from servers of their own
(continuous_run.py), where half of the lives lose a server, too.  continuous: two steps ahead,
where a weight sync drains, or aborts.  teacher: three runs with rewards and a teacher, which they
serve.  A life ends by
    TERM   SIGTERM to one rank or to both: it saves and exits with the requeue code
    KILL   SIGKILL to one rank, then SIGTERM to the other, as a launcher does
    STOP   SIGSTOP to one rank, a second later SIGTERM to both: the other must not wait longer than
           its grace period
After each: the checkpoint that `latest` names is complete and not older than the last one logged,
and the next life starts there. In the end the run is finished and its last checkpoint compared,
file by file, with that of an undisturbed run.  What each step of a run with servers trained on is
checked, too, and that every token has its teacher's number.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_rl.checkpoint.folder import latest_checkpoint
from megatron_rl.checkpoint.manifest import damage, read_manifest
from megatron_rl.launch.signals import REQUEUE
from megatron_rl.rollout.server.ports import free_port
from tests import continuous_run
from tests.faults.samples import SPEC
from tests.saved_run import make_material, sections

RANKS = 2
GRACE = 5.0
KINDS = ("TERM", "KILL", "STOP")
WAYS = {
    "saved": ("saved",),
    "continuous": ("drain", "abort"),
    "teacher": continuous_run.TEACHER_WAYS,
}
COLLECTIVE_MINUTES = 1.0
PATIENCE = 60.0 * COLLECTIVE_MINUTES + 90.0
"""Without a launcher that ends it, a rank whose peer died before their rendezvous waits for that
limit.  The rest is its start, which took more than 30 s on a busy machine."""
SAVED = re.compile(r"checkpoint \S+/step_(\d+)\S* \(")
RUNNING = re.compile(r"^parity:|^training on the rollouts", re.MULTILINE)
RESUMED = re.compile(r"resumed from \S+: step (\d+)")


@dataclass
class Life:
    """One start of the run.  codes: exit status of each rank; seconds: from the signal to the end
    of all ranks; servers: killed before; had_started: it trained when the signal came."""

    kind: str
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    phase: str = ""
    had_started: bool = False
    left_over: int = 0
    servers: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=[*WAYS], default="saved")
    parser.add_argument("--longest", type=float, default=10.0, help="seconds of a life at most")
    parser.add_argument(
        "--steps", type=int, default=600, help="of saved rollouts: more than the lives can train"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no further life after this time"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import megatron_rl.train  # noqa: F401  imported once: forked ranks start within a second
    from megatron_rl.config import config
    from megatron_rl.trainer import build

    rng = random.Random(args.seed)
    ways = WAYS[args.mode]
    for module in (config, build):  # the servers of tests.token_server need no GPU for it
        module.check_can_release = lambda cfg, device: None
    return max(kill_run(way, rng, args.kills // len(ways), args) for way in ways)


def kill_run(way: str, rng: random.Random, kills: int, args: argparse.Namespace) -> int:
    """One run and its kills; 0 if nothing was lost.

    way: saved, or that of a continuous run (continuous_run.sections).
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_material(
            work,
            steps=args.steps if way == "saved" else 1,
            layers=4 if way == "saved" else SPEC.num_layers,
        )
        if way != "saved":
            continuous_run.make_prompts(work, args.steps)
        deadline = time.monotonic() + args.seconds
        lives: list[Life] = []
        while len(lives) < kills and time.monotonic() < deadline:
            lives.append(kill_once(work, way, rng, len(lives), args))
        return report(way, lives, finish(work, way, args.steps))


def kill_once(
    work: Path, way: str, rng: random.Random, index: int, args: argparse.Namespace
) -> Life:
    life, log = Life(KINDS[index % len(KINDS)]), work / f"life_{index}.log"
    before = saved_step(work)
    pids = start(work, way, "run", log, args.steps, is_async=index % 2 == 1)
    if rng.random() < 0.75:
        wait_until_running(log)
    seconds = rng.uniform(0.2, args.longest)
    before_server = (
        rng.uniform(0.0, seconds) if way != "saved" and index // len(KINDS) % 2 else seconds
    )
    time.sleep(before_server)
    # a server that does not start would end the run
    if before_server < seconds and RUNNING.search(log.read_text()):
        found = continuous_run.servers(pids)
        assert found, f"life {index} ended by itself: {log.read_text()}"
        rng.choice(found).kill()
        life.servers = 1
    time.sleep(seconds - before_server)
    text = log.read_text()
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids), (
        f"life {index} ended by itself: {text}"
    )
    life.had_started = RUNNING.search(text) is not None
    life.phase = text.strip().splitlines()[-1][:60] if text.strip() else "starting"
    announced = max([before, *map(int, SAVED.findall(text))])
    sent, victim = time.monotonic(), rng.choice(pids)
    if life.kind == "TERM":
        send(signal.SIGTERM, rng.choice([[victim], pids]))
    else:
        send(signal.SIGKILL if life.kind == "KILL" else signal.SIGSTOP, [victim])
        time.sleep(1.0)
        send(signal.SIGTERM, pids)
    life.codes, life.left_over = wait(pids, victim if life.kind == "STOP" else None)
    life.seconds = time.monotonic() - sent
    time.sleep(0.5)  # the kernel ends a server a moment after its rank
    life.left_over += len(continuous_run.left_behind(work))
    resumed = [int(step) for step in RESUMED.findall(log.read_text())]
    assert resumed in ([before], []) or before == 0, (
        f"life {index} resumed from {resumed}, latest was {before}"
    )
    after = saved_step(work)
    assert after >= announced, (
        f"life {index}: step {announced} was logged as saved, latest is {after}"
    )
    took = f"exit {life.codes}, ended in {life.seconds:.1f} s; saved {before} -> {after}"
    what = life.kind + (", and a server" if life.servers else "")
    print(f"{index:3d} {what} at {life.phase!r}: {took}", flush=True)
    return life


def wait_until_running(log: Path, patience: float = PATIENCE) -> None:
    """The ranks, and servers, have started, which takes longer on a busy machine than
    `--longest`.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not (log.exists() and RUNNING.search(log.read_text())):
        time.sleep(0.1)


def start(
    work: Path, way: str, name: str, log: Path, steps: int, *, is_async: bool, every: int = 1
) -> list[int]:
    """Fork the ranks; their pids."""
    from megatron_rl.config import dump_config, load_config

    more = {
        "run": {"name": name, "collective_timeout_minutes": COLLECTIVE_MINUTES},
        "parallel": {"ep": RANKS},
        "optim": {"schedule": "constant"},
        "checkpoint": {
            "every": every, "keep_last": 3, "async_save": is_async, "grace_seconds": GRACE,
            "export_hf": False
        },
        **({} if way == "saved" else continuous_run.sections(work, way)),
    }  # fmt: skip
    log.touch()
    config = work / f"{log.stem}.toml"
    config.write_text(
        dump_config(load_config(None, [], sections(work, work / "runs", steps=steps, **more)))
    )
    port = str(free_port())
    arguments = [
        "--config",
        str(config),
        *(["--from-rollouts", str(work / "live")] if way == "saved" else []),
    ]
    return [fork_rank(rank, port, arguments, log) for rank in range(RANKS)]


def fork_rank(rank: int, port: str, arguments: list[str], log: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.setpgrp()
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        from megatron_rl.train import main as train

        status = train(arguments)
    finally:
        sys.stdout.flush()
        os._exit(status)


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)  # not reaped yet, so it is ours


def wait(
    pids: list[int], stopped: int | None = None, patience: float = PATIENCE
) -> tuple[list[int], int]:
    """(exit statuses, ranks that had to be killed after `patience`).

    A stopped one cannot end by itself: it is killed last.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + patience
    while set(codes) | {stopped} < {*pids, stopped} and time.monotonic() < deadline:
        for pid in pids:
            if pid not in (*codes, stopped):
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    late = [pid for pid in pids if pid not in (*codes, stopped)]
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids], len(late)


def saved_step(work: Path) -> int:
    """The step of the newest checkpoint, which must be complete."""
    path = latest_checkpoint(work / "runs/run/checkpoints")
    if path is None:
        return 0
    found = damage(path, read_manifest(path))
    assert not found, found
    return int(path.name[5:11])


def finish(work: Path, way: str, most: int) -> tuple[int, list[str]]:
    """Three more steps, and the same steps in a run without kills: (steps, names of the files that
    are not the same).
    """
    steps = min(saved_step(work) + 3, most)
    for name in ("run", "undisturbed"):
        log = work / f"finish_{name}.log"
        pids = start(
            work, way, name, log, steps, is_async=False, every=0 if name == "undisturbed" else 1
        )
        codes, _ = wait(pids, patience=PATIENCE + 10.0 * steps)
        assert codes == [0] * RANKS, log.read_text()
        if way != "saved":
            print(
                f"{way}, {name}: tokens of age"
                f" {continuous_run.check_rollouts(work / 'runs' / name, steps)}",
                flush=True,
            )
        if way in continuous_run.TEACHER_WAYS:
            taught = continuous_run.check_teacher(work / "runs" / name, steps)
            print(f"{way}, {name}: {taught} tokens have their teacher's number", flush=True)
    ends = [work / f"runs/{name}/checkpoints/step_{steps:06d}" for name in ("run", "undisturbed")]
    files = [
        {
            n: d
            for n, d in read_manifest(end).files.items()
            if n.endswith((".distcp", ".safetensors"))
        }
        for end in ends
    ]
    assert len(files[0]) >= 2 * RANKS
    return steps, sorted(
        name
        for name in files[0].keys() | files[1].keys()
        if files[0].get(name) != files[1].get(name)
    )


def report(way: str, lives: list[Life], end: tuple[int, list[str]]) -> int:
    steps, differing = end
    for kind in KINDS:
        mine = [life for life in lives if life.kind == kind]
        if mine:
            slowest = max(life.seconds for life in mine)
            requeued = sum(REQUEUE in life.codes for life in mine)
            left = sum(life.left_over for life in mine)
            counts = (
                f"all resumed; requeue code {requeued}; ended within {slowest:.1f} s; left over"
                f" {left}"
            )
            print(f"{kind}: {len(mine)} kills, {counts}")
    verdict = f"DIFFERENT ({', '.join(differing)}) from" if differing else "the same as"
    servers = f"{sum(life.servers for life in lives)} of servers, " if way != "saved" else ""
    started = sum(life.had_started for life in lives)
    print(
        f"{way}: {len(lives)} kills, {started} of them after the start, {servers}{steps} steps; "
        f"last checkpoint {verdict} that of an undisturbed run"
    )
    return 1 if differing or any(life.left_over for life in lives) else 0


if __name__ == "__main__":
    sys.exit(main())
