"""Teachers that have GPU memory only while they score: who has memory when, what a step trains on,
and what happens where a teacher does not wake, or a signal comes meanwhile.
"""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from megatron_rl.config.sections import Teacher
from megatron_rl.config.sections.teachers import TeachersConfig
from megatron_rl.rollout.client.client import RolloutError
from megatron_rl.rollout.client.score_request import ScoreRequest
from megatron_rl.rollout.client.teachers import Teachers
from megatron_rl.rollout.group import Group, GroupState
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.rollout.time_shared_teachers import SleepingTeacher, TimeSharedTeachers
from megatron_rl.weights.sync.servers import Servers
from tests.fake_server import SPEC, send, wait_for
from tests.fake_teacher import FakeTeacher, expected_logprobs
from tests.sampling_loop import PER_STEP, training

pytestmark = pytest.mark.usefixtures("one_rank")
NAMES = ("even", "odd")
MEMORY = {"/release_memory_occupation": "releases", "/resume_memory_occupation": "wakes"}
PROBE = [3, 4, 5, 6]


class GpuTeacher(FakeTeacher):
    """A teacher on a GPU that others use, too: it scores only while it has its memory.

    `events` gets what it does.  `control_faults` has a path -> status, or "hang".  After it woke,
    its log-probs have the error `drift`.
    """

    name, events, has_memory, drift = "", None, True, 0.0

    def route(self, handler, body):
        fault = self.control_faults.get(handler.path)
        if fault == "hang":
            self.stopping.wait(30)
        elif fault is not None:
            send(handler, fault, b"no memory")
        elif handler.path in MEMORY:
            is_release = "release" in handler.path
            if is_release:
                assert self.has_memory and self.is_paused
            # the weights come first, alone
            if is_release or body["tags"] == ["weights"]:
                self.events.append(f"{self.name} {MEMORY[handler.path]}")
            self.has_memory = not is_release
            send(handler, 200, b"{}")
        elif handler.path == "/flush_cache":
            send(handler, 200, b"{}")
        elif body.get("rid") == "probe":
            assert self.has_memory and not self.is_paused
            self.behave(handler, "ok", body)
        else:
            if handler.path == "/generate":
                assert self.has_memory and not self.is_paused, "asked while it sleeps"
                if self.events[-1] != f"{self.name} scores":
                    self.events.append(f"{self.name} scores")
            super().route(handler, body)

    def sleeper(self, timeout: float = 5.0) -> SleepingTeacher:
        request = ScoreRequest("probe", PROBE, 1, SPEC.vocab_size)

        def probe() -> np.ndarray:
            answer = httpx.post(f"{self.url}/generate", json=request.body()).json()
            return request.logprobs(answer["meta_info"]) - self.drift

        return SleepingTeacher(self.name, Servers([self.url], {}, timeout), probe)


@contextmanager
def taught(names=NAMES, scripts=(), with_memory=True, **rollout):
    """(loop, teachers by name, events) of a run whose prompts are of the sources even and odd."""
    events = []
    with training("ok", temperature=1.0, **rollout) as (loop, server), ExitStack() as stack:
        teachers = {}
        for name in names:
            teacher = stack.enter_context(GpuTeacher(*dict(scripts).get(name, ("ok",))))
            teacher.name, teacher.events = name, events
            teachers[name] = teacher
        tables = {
            name: Teacher(path="t", sources=(name,), release_memory=True).at((t.url,))
            for name, t in teachers.items()
        }
        cfg = loop.cfg.model_copy(update={"teachers": TeachersConfig.model_validate(tables)})
        loop.cfg = loop.scheduler.cfg = loop.rollouts.cfg = cfg
        loop.source.prompts = [
            replace(prompt, source=NAMES[number % 2])
            for number, prompt in enumerate(loop.source.prompts)
        ]
        inference = loop.inference
        inference.client.teachers = Teachers(tables, cfg.rollout, SPEC.vocab_size)
        note_sampling(server, events)
        sleepers = {name: teacher.sleeper() for name, teacher in teachers.items()}
        for sleeper in sleepers.values():
            sleeper.release()
        inference.time_shared_teachers = TimeSharedTeachers(tuple(names), sleepers)
        if with_memory:
            share_memory(loop, events)
        events.clear()
        yield loop, teachers, events, server


def note_sampling(server, events):
    behave = server.behave

    def noted(handler, behaviour, body):
        assert not events or events[-1] != "servers release", "asked while they sleep"
        if events[-1:] != ["sampling"]:
            events.append("sampling")
        behave(handler, behaviour, body)

    server.behave = noted


def share_memory(loop, events):
    """Trainer and servers have the GPUs in turn, as with rollout.release_memory."""
    note = events.append

    def push(export, version, *, serve, keep_requests):
        assert not serve and not keep_requests
        loop.model.version = version

    loop.inference.pusher = SimpleNamespace(
        push=push, set_urls=lambda urls: None, serve=lambda version: note("servers wake"),
        release_memory=lambda: note("servers release"),
    )  # fmt: skip
    loop.inference.memory = SimpleNamespace(
        free_training=lambda: 0,
        free_weights=lambda: note("trainer frees"),
        restore=lambda: note("trainer restores"),
    )


def step(loop, number):
    """One step, as the trainer goes through it; its groups."""
    loop.rollouts.serve()
    loop.rollouts.draw(loop.scheduler.take, number)
    finished = [group for group in loop.scheduler.removed if group.state is GroupState.TAKEN]
    taken = [group.rollout_group() for group in finished]
    loop.rollouts.give_memory_to_trainer()
    loop.rollouts.sync_weights(number + 1)
    loop.scheduler.step_done()
    return taken


def assert_taught(groups):
    assert len(groups) == PER_STEP
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        expected = expected_logprobs(rollout.tokens, rollout.sampled)
        np.testing.assert_array_equal(rollout.teacher_logprobs, expected)


IN_TURNS = [
    "even wakes", "even scores", "even releases", "odd wakes", "odd scores", "odd releases",
]  # fmt: skip
MODES = {
    "synchronous": {},
    "drop": {"over_sample": 1.0},
    "resume": {"over_sample": 1.0, "partial": "resume", "max_staleness": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_servers_teachers_and_trainer_have_the_memory_one_after_the_other(mode):
    with taught(**MODES[mode]) as (loop, _, events, _server):
        loop.inference.give_memory_to_trainer()
        for number in range(3):
            events.clear()
            assert_taught(groups := step(loop, number))
            # with over_sample a step may find its responses complete
            assert ("sampling" in events) or (number and mode == "resume")
            # with "drop" the quickest responses may be to prompts of one source
            sources = {group.prompt.source for group in groups}
            assert sources == set(NAMES) or mode == "drop"
            turns = [event for event in IN_TURNS if event.split()[0] in sources]
            assert [event for event in events if event != "sampling"] == [
                "trainer frees", "servers wake", "servers release", *turns, "trainer restores",
            ]  # fmt: skip
            assert "sampling" not in events or events.index("sampling") == 2
            seconds = loop.inference.teacher_seconds()
            assert seconds["teacher/switch_seconds"] > 0
            assert set(seconds) == {"teacher/switch_seconds", "teacher/turn_seconds"}
        assert not any(loop.inference.teacher_seconds().values())


def test_teachers_share_gpus_of_their_own_beside_servers_that_keep_theirs():
    """The last one keeps its memory, which no other teacher wants, until the step has left it."""
    with taught(with_memory=False) as (loop, _, events, _server):
        for number in range(2):
            events.clear()
            assert_taught(step(loop, number))
            assert events == ["sampling", *IN_TURNS]


def test_a_teacher_without_a_prompt_in_the_step_sleeps():
    with taught() as (loop, _, events, _server):
        loop.inference.give_memory_to_trainer()
        loop.source.prompts = [replace(prompt, source="odd") for prompt in loop.source.prompts]
        events.clear()
        assert_taught(step(loop, 0))
        assert not any("even" in event for event in events) and "odd wakes" in events


def test_rewards_of_groups_that_were_scored_while_others_were_sampled_stay():
    with taught() as (loop, _, _events, server):
        loop.inference.give_memory_to_trainer()
        server.is_slow, server.patience = (lambda number: number == 1), 1.0

        def reward(groups):
            for group in groups:
                closed = group.rollout_group()
                rollouts = (replace(r, response_text="text") for r in closed.rollouts)
                group.scored = replace(closed, rollouts=tuple(rollouts), rewards=np.float32([1, 2]))

        loop.scheduler.score = reward
        groups = step(loop, 0)
        assert_taught(groups)
        rewarded = [group for group in groups if group.rewards is not None]
        assert rewarded, "none was complete before the last"
        for group in rewarded:
            assert {rollout.response_text for rollout in group.rollouts} == {"text"}


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        ("/resume_memory_occupation", "hang", r"teacher odd did not wake: server \S+_occupation did"
         r" not answer within 0.3 s"),
        ("/resume_memory_occupation", 500, "teacher odd did not wake: .* answered 500: no memory"),
        ("/continue_generation", 500, "teacher odd did not wake: .*continue_generation answered"),
        ("/release_memory_occupation", 500, "teacher odd did not release its memory: .* 500"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_switch_is_named(path, fault, message):
    with GpuTeacher("ok") as teacher:
        teacher.name, teacher.events = "odd", []
        sleeper = teacher.sleeper(timeout=0.3)
        turns = TimeSharedTeachers(("odd",), {"odd": sleeper})
        if "release" not in path:
            sleeper.release()
        teacher.control_faults[path] = fault
        with pytest.raises(ServerError, match=message):
            turns.wake("odd")
            turns.release()
        assert turns.awake == ("odd" if "release" in path else "")


@pytest.mark.parametrize(("drift", "is_named"), [(0.09, False), (0.2, True), (np.nan, True)])
def test_a_teacher_that_wakes_with_other_weights_is_named(drift, is_named):
    with GpuTeacher("ok") as teacher:
        teacher.name, teacher.events = "odd", []
        sleeper = teacher.sleeper()
        sleeper.release()
        teacher.drift = drift
        if not is_named:
            sleeper.wake()
            return
        with pytest.raises(ServerError, match=r"teacher odd: http\S+ has other weights since it"):
            sleeper.wake()


def test_a_teacher_that_stays_wrong_stops_the_run():
    with taught(scripts={"odd": ("nan",)}, max_retries=0) as (loop, _, events, _server):
        loop.inference.give_memory_to_trainer()
        with pytest.raises(RolloutError, match="teacher odd did not score"):
            step(loop, 0)
        assert events[-1] == "odd scores"


def test_a_signal_while_a_teacher_scores_leaves_all_to_the_checkpoint():
    """The sampled and scored responses are saved, and the trainer gets the memory."""
    with taught(scripts={"odd": ("hang",)}) as (loop, _teachers, events, _server):
        loop.inference.give_memory_to_trainer()

        def stop():
            wait_for(lambda: events[-1] == "odd scores", 10)
            loop.inference.client.stop(keep_parts=True)

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(SamplingStopped):
            step(loop, 0)
        thread.join()
        loop.rollouts.give_memory_to_trainer()
        assert events[-2:] == ["odd releases", "trainer restores"]
        groups = loop.scheduler.removed
        assert [group.is_complete for group in groups] == [True, False]
        assert all(group.is_sampled for group in groups)
        assert list(loop.scheduler.files(is_step_done=False)) == ["rollouts_00000.safetensors"]


def test_a_resumed_run_samples_nothing_again_and_asks_only_teachers_that_have_not_scored():
    with taught() as (loop, teachers, _events, server):
        loop.inference.give_memory_to_trainer()
        first = step(loop, 0)
        loop.rollouts.serve()
        asked = {name: len(teacher.requests) for name, teacher in teachers.items()}
        sampled = len(server.requests)
        restored = [
            Group(group.prompt, len(group.rollouts), dict(enumerate(group.rollouts)))
            for group in first
        ]
        restored[1].rollouts = {
            index: replace(rollout, teacher_logprobs=None)
            for index, rollout in restored[1].rollouts.items()
        }
        loop.scheduler.restored = restored
        loop.source.load_state_dict(loop.source.state_dict(first=[g.prompt for g in first]))
        loop.inference.version = loop.rollouts.policy_version = 0
        assert_taught(step(loop, 0))
        assert len(server.requests) == sampled
        new = {name: len(teacher.requests) - asked[name] for name, teacher in teachers.items()}
        assert new == {"even": 0, "odd": 2}
