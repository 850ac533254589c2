"""A clock that moves when a test says so, a group of one rank, and no pauses before a request is
repeated.
"""

import pytest
import torch.distributed as dist

from megatron_rl.rollout.client import request
from megatron_rl.rollout.client.clock import Alarm, Clock


class FakeClock(Clock):
    """client.clock of a test, with the pauses of a real one: deadlines pass by `advance` alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(lambda: self.seconds)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def alarm(self, seconds, call) -> Alarm:
        return QuickAlarm(self, self() + seconds, call)


class QuickAlarm(Alarm):
    """Looks at the clock again and again, however far its end is."""

    def _wait(self, seconds: float) -> None:
        super()._wait(min(seconds, 0.005))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_pauses_between_requests(monkeypatch):
    monkeypatch.setattr(request, "RETRY_SECONDS", 0.0)
