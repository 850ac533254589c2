"""slime's and verl's fully asynchronous training by their own rules, on the simulated clock of
sampling_model.py.

slime 624b824 (slime/rollout/fully_async_rollout.py, train_async.py):
    a worker keeps sglang_server_concurrency x engines groups in progress, and starts none while as
    many complete ones wait (AsyncRolloutWorker._loop, once per second); as many responses are
    requested at a time, first come, first served (GenerateState.semaphore).  A rollout is the
    rollout_batch_size groups that were complete first (get_completed_groups), the next one is
    collected while the model trains, and is complete before weights change (train_async.train).  A
    weight sync aborts what runs (pause_generation); a group with an aborted response goes back to
    the buffer when its other responses have ended (_make_done_cb), from which the next groups are
    taken first (RolloutDataSourceWithBuffer).  Its tokens are the input of the next request
    (_prepare_prompt_ids), although the example's README says that it starts over.  No age is
    checked.
verl 1dda039 (verl/experimental/fully_async_policy, fully_async_rollouter.py and
fully_async_trainer.py):
    a prompt is requested with all its responses; at most 16 prompts per server are in progress
    (concurrent_samples_per_replica). None is started once (1 + staleness_threshold) x a step's
    prompts were started since the last weight sync, those that were in progress or in the queue
    then included (_should_pause_generation, reset_staleness).  The trainer takes prompts in the
    order of completion, a mini-batch at a time (_get_samples_from_queue), and sends weights after
    trigger_parameter_sync_step of them, which aborts what runs; it is continued
    (FullyAsyncLLMServerClient.generate).  No age is checked.

Prompts of a step, mini-batches and time are the workload's.  Both wait a second at some places;
here nothing does.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from benchmarks.sampling_model import Record, Response, Servers, Speed, Workload


@dataclass(eq=False)
class Group:
    """The responses of a prompt."""

    number: int
    responses: list[Response]
    left: int = 0
    """Responses that have not ended in this attempt."""
    cut: bool = False
    """One of them was aborted."""

    def unfinished(self) -> list[Response]:
        return [response for response in self.responses if response.done < response.length - 1e-6]


@dataclass
class Peer:
    """The common part of both: a queue of complete groups in the order of completion, from which a
    trainer takes.
    """

    workload: Workload
    speed: Speed
    servers: Servers = field(init=False)

    def __post_init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.complete: deque[Group] = deque()
        self.servers = Servers(self.speed, self.ended)
        self.numbers = itertools.count()
        self.record = Record(self.workload)

    def new_group(self) -> Group:
        number = next(self.numbers)
        lengths = self.workload.lengths(number)
        self.groups[number] = Group(
            number, [Response((number, k), length) for k, length in enumerate(lengths)]
        )
        return self.groups[number]

    def ended(self, response: Response) -> None:
        raise NotImplementedError

    def collect(self, count: int) -> list[Group]:
        """Wait for so many complete groups; these seconds are the trainer's idle time."""
        began = self.servers.clock
        self.servers.advance(is_enough=lambda: len(self.complete) >= count)
        self.record.idle += self.servers.clock - began
        taken = [self.complete.popleft() for _ in range(count)]
        self.fill()
        return taken

    def fill(self) -> None:
        """Start what may be started."""
        raise NotImplementedError

    def train(self, groups: list[Group]) -> float:
        """Train, and return the time at which the update ends."""
        responses = [
            (response.key, response.segments) for group in groups for response in group.responses
        ]
        for group in groups:
            del self.groups[group.number]
        return self.servers.clock + self.record.train(responses, self.servers.version)

    def finish(self) -> Record:
        record = self.record
        record.running = self.servers.busy / self.servers.clock
        record.check(range(next(self.numbers)), self.groups)
        return record


@dataclass
class Slime(Peer):
    """The scheduler of slime."""

    concurrency: int = 128
    """sglang_server_concurrency: responses at a time, and groups in progress, per server."""
    starts_over: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.most = self.concurrency * self.speed.servers
        self.active: dict[int, Group] = {}
        self.buffer: deque[Group] = deque()
        self.turns: deque[Response] = deque()  # of the semaphore
        self.asked = 0

    def run(self) -> Record:
        self.fill()
        following = self.collect(self.workload.prompts)
        for step in range(self.workload.steps):
            self.servers.advance(self.train(following))
            if step + 1 < self.workload.steps:
                following = self.collect(self.workload.prompts)
            self.sync()
            self.record.step_done(self.servers.clock)
        return self.finish()

    def fill(self) -> None:
        while len(self.active) < self.most and len(self.complete) < self.most:
            group = self.buffer.popleft() if self.buffer else self.new_group()
            self.active[group.number] = group
            unfinished = group.unfinished()
            group.left, group.cut = len(unfinished), False
            self.turns += unfinished
        self.ask()

    def ask(self) -> None:
        while self.turns and self.asked < self.most:
            self.asked += 1
            self.servers.submit(self.turns.popleft())

    def ended(self, response: Response) -> None:
        self.end(response, cut=False)
        self.fill()

    def end(self, response: Response, *, cut: bool) -> None:
        group = self.groups[response.key[0]]
        self.asked -= 1
        group.left -= 1
        group.cut |= cut
        if group.left == 0:
            del self.active[group.number]
            (self.buffer if group.cut else self.complete).append(group)

    def sync(self) -> None:
        for response in self.servers.stop():
            if self.starts_over:
                response.segments.clear()
            self.end(response, cut=True)
        self.servers.pause(self.workload.sync)
        self.servers.version += 1
        self.fill()


@dataclass
class Verl(Peer):
    """The scheduler of verl."""

    threshold: float = 0.5
    """staleness_threshold."""
    mini_batches: int = 4
    """Mini-batches of a step (trigger_parameter_sync_step)."""
    per_server: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limit = int(self.workload.prompts * (1 + self.threshold))
        self.most = min(self.per_server * self.speed.servers, self.limit)
        self.active, self.started = 0, 0

    def run(self) -> Record:
        self.fill()
        for _ in range(self.workload.steps):
            for _ in range(self.mini_batches):
                groups = self.collect(self.workload.prompts // self.mini_batches)
                self.servers.advance(self.train(groups))
            self.sync()
            self.record.step_done(self.servers.clock)
        return self.finish()

    def fill(self) -> None:
        while (
            self.active < self.most
            and self.started < self.limit
            and len(self.complete) < self.limit
        ):
            group = self.new_group()
            group.left = len(group.responses)
            self.active += 1
            self.started += 1
            for response in group.responses:
                self.servers.submit(response)

    def ended(self, response: Response) -> None:
        group = self.groups[response.key[0]]
        group.left -= 1
        if group.left == 0:
            self.active -= 1
            self.complete.append(group)
            self.fill()

    def sync(self) -> None:
        stopped = self.servers.stop()
        self.servers.pause(self.workload.sync)
        self.servers.version += 1
        self.started = self.active + len(self.complete)
        for response in stopped:
            self.servers.submit(response)
        self.fill()
