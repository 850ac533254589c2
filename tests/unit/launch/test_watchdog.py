"""The rules, with a dictionary as the store and given times; and three real processes, one of which
stops.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from megatron_rl.launch import watchdog
from megatron_rl.launch.exit_codes import STALLED
from megatron_rl.launch.heartbeats import CUT_OFF, ENDED, LOADING, RankState, lost_peer
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.launch.status import names
from megatron_rl.launch.watchdog import Watchdog, WatchSettings
from megatron_rl.rollout.server.ports import free_port
from tests.fake_server import wait_for

HOST = socket.gethostname()


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def check(self, keys):
        return all(key in self for key in keys)


class Gone(Store):
    def set(self, key, value):
        raise RuntimeError("Broken pipe")


def make(world, tmp_path, *, stage=1000.0, silence=30.0):
    store, settings = Store(), WatchSettings(stage, silence, tmp_path)
    return [
        Watchdog(store, rank, world, settings, stop=lambda verdict: None)
        for rank in reversed(range(world))
    ][::-1]


def enter_at(dog, stage, step, seconds_ago):
    dog.enter(stage, step)
    dog._state = dog._state._replace(since=time.monotonic() - seconds_ago)


def test_while_all_ranks_send_heartbeats_none_stops(tmp_path):
    dogs = make(3, tmp_path)
    for now in range(0, 600, 20):
        for dog in dogs[1:] + dogs[:1]:
            assert dog.tick(now) is None


def test_a_silent_rank_is_named_with_where_it_was(tmp_path):
    dogs = make(4, tmp_path)
    for rank, dog in enumerate(dogs):
        dog.enter("update" if rank == 2 else "push", 11)
        dog.tick(0)
    for now in (20, 55):
        for rank in (1, 3):
            dogs[rank].tick(now)
        verdict = dogs[0].tick(now)
    assert verdict.startswith(
        "no heartbeat from rank 2 for 30 s, dead or stopped: rank 2 was last in update of step 12"
    )
    assert "ranks 0 to 1, 3 in push of step 12" in verdict
    assert dogs[1].tick(56) == dogs[3].tick(56) == verdict, "every rank reads it"


def test_rank_0_is_watched_by_the_others(tmp_path):
    dogs = make(3, tmp_path)
    dogs[0].enter("rollout", 0)
    for now in (0, 10, 20, 45):
        verdicts = [dog.tick(now) for dog in dogs[1:]]
        if now == 0:
            dogs[0].tick(now)
    assert (
        verdicts[0]
        == verdicts[1]
        == "no heartbeat from rank 0 for 30 s, dead or stopped: rank 0 was last in rollout of step"
        f" 1 on {HOST}"
    )


def test_a_long_stage_names_the_rank_that_the_others_wait_for(tmp_path):
    dogs = make(4, tmp_path, stage=600)
    for dog in dogs:
        dog.enter("rollout", 4)
    for rank in (0, 1, 3):
        enter_at(dogs[rank], "split", 4, 700)
    now = time.monotonic()
    dogs[2]._state = dogs[2]._state._replace(since=now - 800)
    for dog in dogs[1:]:
        dog.tick(now)
    verdict = dogs[0].tick(now)
    assert (
        "rank 2 still in rollout of step 5 after 800 s, and the others wait: ranks 0 to 1, 3 in"
        " split of step 5" in verdict
    )


def test_all_ranks_in_one_stage_are_named_together(tmp_path):
    dogs = make(2, tmp_path, stage=600)
    for dog in dogs:
        enter_at(dog, "update", 0, 601)
    dogs[1].tick(time.monotonic())
    assert "every rank has been in update of step 1 for more than 600 s" in dogs[0].tick(
        time.monotonic()
    )
    alone = Watchdog(None, 0, 1, WatchSettings(600, 30, tmp_path))
    assert alone.tick(time.monotonic()) is None
    enter_at(alone, "update", 0, 601)
    assert "every rank has been in update of step 1" in alone.tick(time.monotonic())


def test_servers_that_are_waited_for_are_named(tmp_path):
    dogs = make(2, tmp_path, stage=600)
    dogs[1].waiting_for = lambda: "http://10.0.0.2:30000 (3 requests)"
    for dog in dogs:
        enter_at(dog, "rollout", 0, 601)
    dogs[1].tick(time.monotonic())
    verdict = dogs[0].tick(time.monotonic())
    assert verdict.endswith(
        "a call in it hangs; rank 1 waits for http://10.0.0.2:30000 (3 requests)"
    )
    enter_at(dogs[0], "split", 0, 601)
    assert (
        "the others wait: rank 0 in split of step 1; rank 1 waits for http://10.0.0.2:30000 (3"
        " requests)" in dogs[0].tick(time.monotonic())
    )
    alone = Watchdog(None, 0, 1, WatchSettings(600, 30, tmp_path))
    alone.waiting_for = lambda: "http://a:1/flush_cache"
    enter_at(alone, "push", 2, 601)
    assert "push of step 3" in alone.tick(
        time.monotonic()
    ) and "waits for http://a:1/flush_cache" in alone.tick(time.monotonic())


def test_loading_weights_has_no_limit_unless_others_wait(tmp_path):
    dogs = make(3, tmp_path, stage=600)
    for dog in dogs:
        enter_at(dog, LOADING, -1, 5000)
        dog.tick(time.monotonic())
    assert dogs[0].tick(time.monotonic()) is None
    for rank in (1, 0):
        enter_at(dogs[rank], "starting or finding servers", -1, 601)
        verdict = dogs[rank].tick(time.monotonic())
    assert (
        "rank 2 still in loading after 5000 s, and the others wait: ranks 0 to 1 in starting or"
        " finding servers" in verdict
    )


def test_the_heartbeats_of_thousands_of_ranks_are_read_less_often_until_one_reports_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watchdog, "READ_AT_ONCE", 2)
    dogs = make(7, tmp_path)
    read = []
    dogs[0].on_heartbeats = lambda beats: read.append(now)
    for now in range(0, 32, 2):
        for dog in dogs[1:] + dogs[:1]:
            assert dog.tick(now) is None
    assert len(read) == 4
    with pytest.raises(ValueError), dogs[5]:
        dogs[5].enter("update", 3)
        raise ValueError("no memory")
    now += 2
    assert dogs[0].tick(now) == "rank 5 stopped in update of step 4: ValueError: no memory"
    silent = make(7, tmp_path)
    verdicts = [
        verdict for now in range(0, 60, 2) for dog in silent[:6] if (verdict := dog.tick(now))
    ]
    assert verdicts[0].startswith("no heartbeat from rank 6 for 30 s")


def test_the_error_of_a_failed_rank_reaches_all(tmp_path):
    dogs = make(3, tmp_path)
    dogs[2].enter("update", 1)
    with pytest.raises(ValueError) as raised, dogs[2]:
        raise ValueError("weights are NaN")
    assert raised.value.__notes__ == ["in update of step 2"], "a note on the error itself"
    assert dogs[0].tick(1) == "rank 2 stopped in update of step 2: ValueError: weights are NaN"
    assert dogs[1].tick(1) == dogs[0].tick(1)


def test_an_error_with_text_that_has_no_utf_8_is_still_that_error(tmp_path, monkeypatch):
    """The name of a file may have it, and the store refuses it."""
    dogs = make(2, tmp_path)
    for rank in (1, 0):
        with pytest.raises(ValueError, match="caf\udce9"), dogs[rank]:
            raise ValueError("no file caf\udce9.txt")
        assert dogs[0].tick(1).endswith("ValueError: no file caf?.txt")


def test_the_error_of_rank_0_reaches_all_before_the_store_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOST_HEARTBEATS", 120 / watchdog.HEARTBEAT_SECONDS)
    dogs = make(2, tmp_path)
    dogs[0].enter("update", 1)
    read = []

    def leave():
        assert wait_for(lambda: dogs[1].tick(1), 60)
        read.append(dogs[1].tick(1))
        dogs[1].__exit__(None, None, None)

    threading.Thread(target=leave).start()
    dogs[1]._thread.start()
    started = time.monotonic()
    with pytest.raises(ValueError), dogs[0]:
        raise ValueError("weights are NaN")
    assert read, "it ended before the other rank had read why"
    assert time.monotonic() - started < 100, "as long as the other rank takes"
    assert dogs[1].tick(1) == "rank 0 stopped in update of step 2: ValueError: weights are NaN"


def test_a_broken_connection_shortens_the_wait_and_the_ranks_of_a_node_are_named_together(tmp_path):
    dogs = make(4, tmp_path, silence=300)
    for now in (0, 2):
        for dog in dogs[1:] + dogs[:1]:
            assert dog.tick(now) is None
    dogs[3].tick(3)  # ranks 2 and 3 go down with their node, a moment after one another's beats
    dogs[1]._state = RankState(0, CUT_OFF, 4, time.monotonic())
    for now in (4, 6, 8, 10, 12):
        dogs[1].tick(now)
        assert dogs[0].tick(now) is None
    dogs[1].tick(14)
    verdict = dogs[0].tick(14)
    assert verdict.startswith(
        "no heartbeat from ranks 2 to 3 for 10 s, dead or stopped: rank 2 was last in start-up"
    )
    assert f"on {HOST}" in verdict and f"rank 1 in {CUT_OFF}" in verdict


def test_errors_of_a_collective_whose_peer_is_gone():
    assert lost_peer(
        RuntimeError(
            "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        )
    )
    assert lost_peer(DistNetworkError("recvValue failed")) and lost_peer(
        DistBackendError("ncclRemoteError")
    )
    assert not lost_peer(RuntimeError("weights are NaN")) and not lost_peer(
        OSError("/gloo/ is full")
    )


def test_a_store_that_does_not_answer_ends_the_wait(tmp_path, monkeypatch):
    """Its node lost power or its network: nothing comes back, no error either, and its client has
    no deadline.
    """
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.05)
    dogs, verdicts, healed = make(2, tmp_path, silence=0.4), [], threading.Event()
    dogs[0].tick(0)
    dogs[1].tick(0)
    dogs[1]._store.get = lambda key: healed.wait(20) and b""
    dogs[1]._stop = lambda verdict: (verdicts.append(verdict), healed.set())
    dogs[1].__enter__()
    assert healed.wait(10)
    assert verdicts[0].startswith("the job's store has not answered for 0 s, the node of rank 0")
    assert f"({HOST}, last in start-up" in verdicts[0]


def test_an_interrupted_rank_0_does_not_wait_for_ranks_that_wait_for_it(tmp_path, monkeypatch):
    """They are in a collective, and notice their own interrupt when rank 0 has gone."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "LOST_HEARTBEATS", 1000)
    dogs = make(2, tmp_path)
    dogs[1].enter("weight_sync", 1)
    dogs[1].tick(0)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), dogs[0]:
        raise KeyboardInterrupt
    assert time.monotonic() - started < 60, "200 s otherwise"


def test_a_rank_that_has_ended_is_not_missed(tmp_path):
    dogs = make(2, tmp_path)
    with dogs[1]:
        pass
    assert dogs[0].tick(0) is None and dogs[0].tick(500) is None


def test_a_store_that_is_gone_names_the_node_of_rank_0(tmp_path):
    dogs = make(2, tmp_path)
    dogs[1]._store = Gone()
    assert "the node of rank 0 is down: Broken pipe" in dogs[1].tick(0)


def test_names():
    assert names([3]) == "rank 3"
    assert names([0, 5, 6, 7, 9]) == "ranks 0, 5 to 7, 9"


def test_a_run_reports_every_stage_to_its_watchdog():
    from megatron_rl.trainer.step_meter import StepMeter

    entered = []
    meter = StepMeter(SimpleNamespace(enter=lambda *where: entered.append(where)))
    meter.step = 4
    with meter.time("update"):
        assert entered == [("update", 4)], "before the stage, which may hang"


def test_a_run_gets_a_watchdog_that_ends_before_its_collectives(tmp_path):
    from megatron_rl.config import load_config
    from megatron_rl.trainer.services import make_watchdog

    run = {
        "dir": str(tmp_path),
        "collective_timeout_minutes": 10.0,
        "silence_timeout_seconds": 77.0,
    }
    cfg = load_config(None, [], {"model": {"path": "m"}, "data": {"train": "d"}, "run": run})
    dog = make_watchdog(cfg, SimpleNamespace(rank=0, world_size=1, store=lambda: None))
    enter_at(dog, "update", 0, 550)
    assert "more than 540 s" in dog.tick(time.monotonic()) and dog._silence_seconds == 77
    with pytest.raises(StoppedBySignal), dog:
        raise StoppedBySignal("saved")
    assert dog._state.stage == ENDED, "all ranks stop together: no failure of this one"


SCRIPT = """
import sys, time
from pathlib import Path
from torch.distributed import TCPStore
from megatron_rl.launch import watchdog
watchdog.HEARTBEAT_SECONDS = 0.2
rank = int(sys.argv[1])
store = TCPStore("127.0.0.1", int(sys.argv[2]), 3, is_master=rank == 0)
settings = watchdog.WatchSettings(stage_seconds=600, silence_seconds=5, folder=Path(sys.argv[3]))
with watchdog.Watchdog(store.clone(), rank, 3, settings) as dog:
    dog.enter("update", 6)
    print("running", flush=True)
    time.sleep(600)
"""


def test_real_processes_end_and_name_the_stopped_one(tmp_path):
    port = free_port()
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(tmp_path)],
            cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout.readline() == "running\n"
        ranks[1].send_signal(signal.SIGSTOP)
        for rank in (0, 2):
            _, errors = ranks[rank].communicate(timeout=120)
            assert ranks[rank].returncode == STALLED, errors
            assert (
                f"rank {rank}: no heartbeat from rank 1 for 5 s, dead or stopped: rank 1 was"
                " last in" in errors
            )
            stacks = (tmp_path / f"logs/stalled_rank{rank}.txt").read_text()
            assert "no heartbeat from rank 1" in stacks and "most recent call first" in stacks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
