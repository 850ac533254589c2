"""Servers and trainer have the GPUs in alternation (rollout.release_memory): who frees and
allocates what, in which order.

The servers are stand-ins that record calls; memory of the trainer is recorded in the same list.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.config import RolloutConfig
from megatron_rl.metrics.events import Events
from megatron_rl.rollout.inference import Inference
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.weights.sync.push import WeightPushError
from tests.unit.weights.test_push_protocol import ControlServer, checkpoint, make_pusher, stream  # noqa: F401

MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
LOADED = "/update_weights_from_tensor"


@dataclass
class RecordedMemory:
    events: list = field(default_factory=list)

    def free_training(self):
        self.events.append(("free training", {}))
        return 0

    def free_weights(self):
        self.events.append(("free weights", {}))
        return 0

    def restore(self):
        self.events.append(("restore", {}))


@pytest.fixture
def shared(checkpoint):  # noqa: F811
    """(inference, server): started, then released for the trainer, as build.py does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ControlServer() as server:
        pusher = make_pusher(checkpoint, server.url, transport="colocated")
        inference = Inference(
            lambda: stream(checkpoint),
            None,
            pusher,
            None,
            [server.url],
            print,
            memory=RecordedMemory(server.calls),
        )
        yield inference, server
        pusher.close()
    dist.destroy_process_group()


def order(server):
    """The events that concern memory and weights, loading once."""
    names = []
    for path, body in server.calls:
        name = f"{path} {' '.join(body['tags'])}" if path in MEMORY else path
        if not path.startswith("/") or path in (*MEMORY, LOADED, "/continue_generation"):
            names += [name] if names[-1:] != [name] else []
    return names


TO_TRAINER = ["/release_memory_occupation weights cuda_graph kv_cache", "restore"]
TO_SERVERS = [
    "free training", "/resume_memory_occupation weights", LOADED, "free weights",
    "/resume_memory_occupation cuda_graph kv_cache",
    "/continue_generation",
]  # fmt: skip


def test_each_side_allocates_after_the_other_has_freed(shared):
    inference, server = shared
    inference.give_memory_to_trainer()
    assert order(server) == TO_TRAINER and not inference.servers_have_memory
    inference.give_memory_to_trainer()
    assert order(server) == TO_TRAINER, "the trainer has the memory"
    inference.push(1)
    assert (
        order(server) == TO_TRAINER + TO_SERVERS
        and inference.servers_have_memory
        and server.version == "1"
    )
    inference.push(2)  # the weights come back first
    assert order(server) == (TO_TRAINER + TO_SERVERS) * 2


def test_the_trainer_stays_away_from_servers_that_did_not_release(shared):
    inference, server = shared
    server.faults["/release_memory_occupation"] = [(500, 0.0)]
    with pytest.raises(WeightPushError, match="release_memory_occupation answered 500"):
        inference.give_memory_to_trainer()
    assert "restore" not in server.paths and inference.servers_have_memory


def test_weights_are_sent_when_servers_sample_next(shared):
    inference, server = shared
    times = []

    class Meter:
        step = 0

        def time(self, name):
            times.append(name)
            return nullcontext()

    scheduler, cfg = (
        SimpleNamespace(prepare_sync=lambda: None),
        SimpleNamespace(rollout=RolloutConfig()),
    )
    rollouts = SimpleNamespace(
        cfg=cfg,
        parallel=SimpleNamespace(rank=1),
        inference=inference,
        scheduler=scheduler,
        meter=Meter(),
        policy_version=0,
        events=Events(),
    )
    rollouts._push = partial(LiveRollouts._push, rollouts)
    inference.give_memory_to_trainer()
    server.calls.clear()
    LiveRollouts.sync_weights(rollouts, 3)
    assert rollouts.policy_version == 3 and not server.calls, (
        "a checkpoint of this step needs the trainer's memory"
    )
    LiveRollouts.serve(rollouts)
    LiveRollouts.serve(rollouts)
    assert order(server) == TO_SERVERS and server.version == "3"
    LiveRollouts.give_memory_to_trainer(rollouts)
    assert order(server) == TO_SERVERS + TO_TRAINER
    assert times.count("weight_sync") == 1
