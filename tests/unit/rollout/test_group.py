"""The states of a group, from the prompt that is drawn to the step that trains on it."""

from threading import Event
from types import SimpleNamespace

import pytest

from megatron_rl.launch.trace import OFF
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.generation_task import GenerationTask
from megatron_rl.rollout.group import Group, GroupState
from tests.unit.batch.rollouts import make_rollout

PROMPT = Prompt("q", "", (1, 2), "")
WAITING, IN_FLIGHT, COMPLETE, TAKEN, DROPPED = GroupState


def complete(group):
    for index in range(group.size):
        group.put(index, make_rollout(f"q/{index}", 2, 3))


def states(groups):
    return [group.state for group in groups]


class Client:
    """Completes the first group of each call, then waits for the end of the call."""

    trace, oldest_version = OFF, 0

    def __init__(self):
        self.asked, self.may_end = Event(), Event()

    def fill(self, groups, sampling, *, keep, on_progress, commands):
        complete(groups[0])
        on_progress()
        self.asked.set()
        assert self.may_end.wait(60)


def test_a_call_samples_a_group_that_waits_and_leaves_it_complete_or_waiting():
    groups, client = [Group(PROMPT, 2), Group(PROMPT, 2), Group(PROMPT, 2)], Client()
    assert states(groups) == [WAITING] * 3
    task = GenerationTask(groups[:2], Sampling(1.0, 8, (), 0), is_open=True)
    task.start(client)
    assert client.asked.wait(60)
    assert states(groups) == [COMPLETE, IN_FLIGHT, WAITING]
    task.add(groups[2:])
    assert states(groups) == [COMPLETE, IN_FLIGHT, IN_FLIGHT]
    assert not groups[0].is_in_task, "a complete group is released"
    client.may_end.set()
    assert task.end("abort") is None
    assert states(groups) == [COMPLETE, WAITING, WAITING]


@pytest.mark.parametrize("is_in_task", [True, False])
def test_a_complete_group_that_becomes_too_old_is_sampled_again(is_in_task):
    group = Group(PROMPT, 2)
    complete(group)
    group.is_in_task = is_in_task
    oldest = group.rollouts[0].oldest_version
    assert not group.drop_older(oldest, has_request=False) and group.state is COMPLETE
    group.scored = SimpleNamespace()
    assert len(group.drop_older(oldest + 1, has_request=False)) == 2 and group.scored is None
    assert group.state is (IN_FLIGHT if is_in_task else WAITING)


def test_a_group_leaves_the_queue_once_and_only_a_complete_one_is_trained_on():
    group = Group(PROMPT, 1)
    for wrong in (TAKEN, COMPLETE):
        with pytest.raises(AssertionError):
            group.leave(wrong)
    group.leave(DROPPED)
    assert group.state is DROPPED
    group = Group(PROMPT, 1)
    complete(group)
    group.leave(TAKEN)
    assert group.state is TAKEN
    with pytest.raises(AssertionError):
        group.leave(DROPPED)
