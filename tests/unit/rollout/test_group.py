"""A group from the prompt that is drawn to the step that trains on it."""

from threading import Event
from types import SimpleNamespace

from megatron_rl.launch.trace import OFF
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.generation_task import GenerationTask
from megatron_rl.rollout.group import Group
from tests.unit.batch.rollouts import make_rollout

PROMPT = Prompt("q", "", (1, 2), "")


def complete(group):
    for index in range(group.size):
        group.put(index, make_rollout(f"q/{index}", 2, 3))


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


def test_an_open_task_releases_groups_that_are_complete():
    groups, client = [Group(PROMPT, 2), Group(PROMPT, 2), Group(PROMPT, 2)], Client()
    task = GenerationTask(groups[:2], Sampling(1.0, 8, (), 0), is_open=True)
    task.start(client)
    assert client.asked.wait(60)
    task.add(groups[2:])
    assert task.groups == groups[1:]
    client.may_end.set()
    assert task.end("abort") is None
    assert [group.is_complete for group in groups] == [True, False, False]


def test_a_complete_group_that_becomes_too_old_is_sampled_again():
    group = Group(PROMPT, 2)
    complete(group)
    oldest = group.rollouts[0].oldest_version
    assert not group.drop_older(oldest, has_request=False) and group.is_complete
    group.scored = SimpleNamespace()
    assert len(group.drop_older(oldest + 1, has_request=False)) == 2 and group.scored is None
    assert group.missing == [0, 1]
