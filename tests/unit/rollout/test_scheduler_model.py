"""The scheduler against a model of what it may do: random completions, lost answers, weight syncs,
signals, kills, resumes.

Ranks are threads: leaders of 1 to 3 replicas, and one rank that leads none.  The servers are
random: which response is complete next, how far an abort came, which answer is lost.  Every
response that is started has a number of its own, its first token. With weight_update = in_place the
servers hold tokens of several versions that no answer has returned yet.
"""

import copy
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.numpy import load_file

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters, drop_older
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.rollout.scheduler import Scheduler, num_prompts

PROMPTS = [Prompt(str(i), "", (i,), "") for i in range(2000)]
PER_STEP, GROUP, STEPS, CONCURRENCY = 6, 2, 9, 3
MODES = [
    {},
    {"over_sample": 0.7},
    {"over_sample": 0.7, "partial": "resume", "max_staleness": 1},
    {"max_staleness": 1},
    {"max_staleness": 2, "weight_update": "abort"},
    {"over_sample": 0.7, "partial": "resume", "max_staleness": 3, "weight_update": "abort"},
    {"max_staleness": 4},
    {"max_staleness": 1, "weight_update": "in_place"},
    {"max_staleness": 3, "weight_update": "in_place"},
    {"over_sample": 0.7, "partial": "resume", "max_staleness": 3, "weight_update": "in_place"},
]
NUMBERS = iter(range(10**9))
START = 10_000  # above the prompts' tokens


def config(mode: int):
    sections = {
        "run": {"num_steps": STEPS, "prompts_per_step": PER_STEP, "group_size": GROUP},
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "replay": {"mode": "none", "measure": False},
        "rollout": MODES[mode],
    }
    return load_config(None, [], sections)


def sampled_more(group: Group, index: int, more: list[int], reason: str) -> None:
    """A further token of response `index` for each version of `more`, the last one unless it is
    cut.
    """
    before = group.prefixes.get(index)
    tokens = (
        [*group.prompt.token_ids, START + next(NUMBERS)] if before is None else [*before.tokens, 0]
    )
    tokens += [0] * (len(more) - 1)
    versions = [*([] if before is None else before.policy_versions.tolist()), *more]
    group.put(
        index,
        Rollout(
            id=f"{group.prompt.id}/{index}", tokens=np.array(tokens), prompt_length=1,
            routed_experts=None, finish_reason=reason,
            rollout_logprobs=np.zeros(len(tokens) - 1, np.float32),
            policy_versions=np.array(versions, np.int32),
        ),
    )  # fmt: skip


def numbers(groups) -> set[int]:
    """Of all responses of these groups, complete or cut."""
    return {
        int(r.tokens[1]) - START
        for group in groups
        for r in (*group.rollouts.values(), *group.prefixes.values())
    }


class Sums:
    """An all-reduce between threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors = threading.Barrier(size, timeout=120), {}

    def add(self, tensor: torch.Tensor, rank: int) -> None:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.tensors.values()))
        self.barrier.wait()


class RandomServers:
    """In place of Inference; lost: responses whose answer never came, with those that over_sample
    dropped.

    held: (group, index) -> (version that the request was sent under, versions of its tokens that
    are not returned yet).
    sampling_version: of the open task; oldest: of the tokens that it keeps."""

    time_shared_teachers = None  # no teacher shares GPUs

    def __init__(self, cfg, version: int, *, leads: bool) -> None:
        self.cfg, self.version = cfg, version
        self.client = (
            SimpleNamespace(take_stats=CallStats, counters=RolloutCounters()) if leads else None
        )
        self.pending: list[Group] | None = None
        self.rng, self.lost, self.signal_after, self.offered, self.due = (
            random.Random(0),
            0,
            None,
            [],
            [],
        )
        self.held: dict[tuple[Group, int], tuple[int, list[int]]] = {}

    def start(self, groups, *, keep, is_open, **settings) -> None:
        assert self.pending is None and (self.client is not None or not groups)
        self.pending, self.keep, self.is_open = list(groups), keep, is_open
        self.held, self.sampling_version, self.oldest = {}, self.version, 0
        oldest = self.version - self.cfg.rollout.max_staleness
        assert all(version >= oldest for group in groups for version in self.ages(group))
        self.find_due(oldest)

    def add(self, groups) -> None:
        self.pending += groups

    def renew(self, groups, oldest: int) -> None:
        if self.pending is None or self.sampling_version == self.version:
            return
        assert self.cfg.rollout.weight_update == "in_place" and self.is_open
        self.send()
        self.sampling_version, self.oldest = self.version, oldest
        for (group, index), (sent, _) in [*self.held.items()]:
            before = group.prefixes.get(index)
            if min(sent, sent if before is None else before.oldest_version) < oldest:
                self.cut_one(group, index)
        idle = [group for group in groups if not any(group is busy for busy, _ in self.held)]
        if self.client is not None:
            drop_older(idle, oldest, self.client.counters)
        self.pending = list(groups)
        self.find_due(oldest)

    def ages(self, group: Group) -> list[int]:
        """Of every response, and of the requests whose answers may have tokens of theirs."""
        found = [r.oldest_version for r in (*group.rollouts.values(), *group.prefixes.values())]
        return found + [sent for (asked, _), (sent, _) in self.held.items() if asked is group]

    def find_due(self, oldest: int) -> None:
        groups = [
            group for group in self.pending if oldest < self.version and oldest in self.ages(group)
        ]
        self.due = [group.prompt.id for group in groups]

    def send(self) -> None:
        """Request what has a slot."""
        for group in self.started:
            for index in group.missing:
                self.held.setdefault((group, index), (self.sampling_version, []))
            self.set_request_version(group)

    def set_request_version(self, group: Group) -> None:
        group.request_version = min(
            (sent for (asked, _), (sent, _) in self.held.items() if asked is group), default=None
        )

    def answer(self, group: Group, index: int, reason: str) -> None:
        """With what was sampled before, and a token of now."""
        _, versions = self.held.pop((group, index))
        sampled_more(group, index, [*versions, self.version], reason)
        self.set_request_version(group)
        drop_older([group], self.oldest, self.client.counters)

    @property
    def started(self) -> list[Group]:
        return [group for group in self.pending if not group.is_complete][:CONCURRENCY]

    def wait(self, version: int, show: Callable[[], None], is_enough: Callable[[], bool]) -> None:
        assert version == self.version, "tokens would be counted as those of other weights"
        done = 0
        while (
            self.client is not None and self.signal_after != done and not self._is_over(is_enough)
        ):
            self.send()
            slow = [0.05 if int(group.prompt.id) % 4 == 0 else 1.0 for group, _ in self.held]
            ((group, index),) = self.rng.choices([*self.held], slow)
            if self.rng.random() < 0.5:
                self.held[group, index][1].append(version)
                continue
            self.answer(group, index, "stop")
            show()
            done += 1
        if self.signal_after is not None:
            self.stop(keep_parts=True)
            raise SamplingStopped
        if not self.is_open:
            if self.client is not None and self.cfg.rollout.partial == "resume":
                self.cut()
            elif self.client is not None:
                # also complete ones of a checkpoint
                self.lost += len(numbers(self.pending)) - self.keep * GROUP
            self.pending = None
        self.offered = [
            (group.prompt.id, group.is_due, group.is_complete) for group in self.queue()
        ]

    def _is_over(self, is_enough: Callable[[], bool]) -> bool:
        if self.is_open:
            return is_enough()
        complete = sum(group.is_complete for group in self.pending)
        return complete >= self.keep and all(
            group.is_complete for group in self.pending if group.is_due
        )

    def cut(self) -> None:
        """Abort everything."""
        self.send()
        for group, index in [*self.held]:
            self.cut_one(group, index)

    def cut_one(self, group: Group, index: int) -> None:
        """Abort: a response is returned as it is, or it just became complete, or the answer is
        lost.
        """
        reason = self.rng.choice(["abort", "abort", "stop", None])
        if reason is None:
            del self.held[group, index]
            self.set_request_version(group)
        else:
            self.answer(group, index, reason)

    def end(self, how: str) -> None:
        if how == "abort":
            self.cut()
        for group in self.started if how == "drain" else ():
            self.send()
            for index in group.missing:
                if self.rng.random() < 0.9:  # else its server died
                    self.answer(group, index, "stop")
        self.pending = None

    def stop(self, *, keep_parts: bool) -> None:
        if self.pending is not None and self.client is not None:
            self.cut()
        self.pending = None


class Runs(RuleBasedStateMachine):
    """A run and its restarts.  trained: prompt -> step; dropped: prompts, by over_sample; late:
    more than a step has room for are too old for the next.  steps, due: of all runs, the latter
    groups that a step had to wait for."""

    mode = 0
    steps = due = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.step, self.trained, self.dropped, self.late = 0, {}, set(), set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(dp=st.sampled_from([1, 2, 3]))
    def start(self, dp: int) -> None:
        self.cfg = config(self.mode)
        self.begin(dp)
        self.save("saved", is_step_done=True)

    def begin(self, dp: int, saved=None) -> None:
        """Start the ranks, from a checkpoint or from nothing."""
        self.dp, self.ranks = dp, []
        for rank in range(dp + 1):
            leads = rank < dp
            parallel = SimpleNamespace(
                dp_rank=rank % dp, dp_size=dp, device=torch.device("cpu"), rank=rank,
                node=SimpleNamespace(is_alone=True),
            )  # fmt: skip
            source = PromptSource(PROMPTS, seed=0, shuffle=False)
            servers = RandomServers(self.cfg, self.step, leads=leads)
            scheduler = Scheduler(
                self.cfg,
                parallel,
                servers,
                source,
                [1],
                lambda *_: nullcontext(lambda amount: None),
            )
            servers.queue = lambda scheduler=scheduler: scheduler.groups
            if saved is not None:
                source.load_state_dict(saved[0])
                scheduler.restore(saved[1], [])
            self.ranks.append(scheduler)

    def save(self, name: str, *, is_step_done: bool, state=None):
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for scheduler in self.ranks:
            for file, write in scheduler.files(is_step_done=is_step_done).items():
                write(folder / file)
        states = (
            [state]
            if state is not None
            else [scheduler.prompts_state() for scheduler in self.ranks]
        )
        assert all(each == states[0] for each in states), "ranks would resume with other prompts"
        model = copy.deepcopy((self.step, self.trained, self.dropped, self.late))
        self.saved = states[0], folder, model, next(NUMBERS)
        return self.saved

    def resume(self, saved, dp: int) -> None:
        state, folder, model, newest = saved
        self.step, self.trained, self.dropped, self.late = copy.deepcopy(model)
        before = {n for n in self.known(folder) if n < newest}
        self.begin(dp, (state, folder))
        assert numbers(self.groups) == before, (
            "a response of the checkpoint was lost or comes twice"
        )

    def known(self, folder: Path) -> set[int]:
        arrays = [
            (name, array) for path in folder.iterdir() for name, array in load_file(path).items()
        ]
        return {int(array[1]) - START for name, array in arrays if name.endswith(":tokens")}

    @property
    def groups(self) -> list[Group]:
        return [
            group for scheduler in self.ranks for group in (*scheduler.groups, *scheduler.restored)
        ]

    def collective(self, call: Callable[[Scheduler], object]) -> list:
        """Call it on every rank, in a thread; sums over ranks need no network."""
        sums, own = Sums(len(self.ranks)), threading.local()

        def run(rank: int) -> object:
            own.rank = rank
            try:
                return call(self.ranks[rank])
            except BaseException:
                sums.barrier.abort()
                raise

        with patch.object(dist, "all_reduce", lambda tensor: sums.add(tensor, own.rank)):
            with ThreadPoolExecutor(len(self.ranks)) as threads:
                futures = [threads.submit(run, rank) for rank in range(len(self.ranks))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error
        return [future.result() for future in futures]

    @precondition(lambda self: self.step < STEPS)
    @rule(
        seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
        more=st.sampled_from([0, 0, 0, 1]),
        signal=st.sampled_from([None, None, None, "sampling", "training", "saving"]),
        dp=st.sampled_from([1, 2, 3]),
    )
    def train(self, seeds: list[int], more: int, signal: str | None, dp: int) -> None:
        """A step for each seed, the last one with the signal."""
        seeds = seeds[: STEPS - self.step]
        for seed in seeds[:-1]:
            self.train_a_step(seed, more, None, dp)
        self.train_a_step(seeds[-1], more, signal, dp)

    def train_a_step(self, seed: int, more: int, signal: str | None, dp: int) -> None:
        self.new_dropped = set()
        state, created = self.ranks[0].prompts_state(), next(NUMBERS)
        waiting, stale, lost = numbers(self.groups), self.count("stale"), self.lost
        for rank, scheduler in enumerate(self.ranks):
            servers = scheduler.inference
            servers.rng = random.Random(seed + rank)
            servers.signal_after = servers.rng.randrange(PER_STEP) if signal == "sampling" else None
        try:
            taken = self.take(lambda scheduler: scheduler.take(self.step, self.step), PER_STEP)
        except SamplingStopped:
            return self.resume(self.save("signal", is_step_done=False, state=state), dp)
        for _ in range(more):
            taken = [
                a + b
                for a, b in zip(
                    taken,
                    self.take(lambda s: s.take_more(self.dp, self.step), self.dp),
                    strict=True,
                )
            ]
        if signal == "training":
            return self.resume(self.save("signal", is_step_done=False, state=state), dp)
        if self.cfg.rollout.max_staleness:  # else what a signal left of over_sample's groups is
            assert self.count("stale") == stale or self.late, (
                "too old, though an earlier step had room for it"
            )
        self.check_trained([group for groups in taken for group in groups])
        self.collective(lambda scheduler: scheduler.prepare_sync())
        for scheduler in self.ranks:
            keeps = self.cfg.rollout.weight_update == "in_place" and self.step < STEPS - 1
            assert (scheduler.inference.pending is None) != keeps, (
                "weights change while something is sampled"
            )
            scheduler.step_done()
            scheduler.inference.version += 1
        new = next(NUMBERS) - created - 1
        trained = GROUP * sum(map(len, taken))
        gone = self.count("stale") - stale + self.lost - lost
        assert len(waiting) + new == trained + gone + len(numbers(self.groups)), (
            "a response ended twice, or never"
        )
        self.step += 1
        type(self).steps += 1
        type(self).due += sum(len(scheduler.inference.due) for scheduler in self.ranks)
        if signal == "saving":
            self.resume(self.save("signal", is_step_done=True), dp)

    def take(self, call, size: int) -> list:
        """The groups that each leader takes; all ranks know the same prompts."""
        found = self.collective(call)
        assert (
            all(each.prompts == found[0].prompts for each in found)
            and len(found[0].prompts) == size
        )
        for scheduler, sampled in zip(self.ranks[: self.dp], found, strict=False):
            offered = [name for name, _, complete in scheduler.inference.offered if complete]
            due = [
                name
                for name, is_due, complete in scheduler.inference.offered
                if complete and is_due
            ]
            expected = (due + [name for name in offered if name not in due])[: size // self.dp]
            mine = [group.prompt.id for group in sampled.groups]
            assert sorted(mine) == sorted(expected), "not the complete groups of the oldest prompts"
            assert mine == [
                prompt.id for prompt in sampled.prompts[scheduler.parallel.dp_rank :: self.dp]
            ]
        assert found[-1].groups == []
        if self.cfg.rollout.partial == "drop" and self.cfg.rollout.over_sample:
            for scheduler, sampled in zip(self.ranks[: self.dp], found, strict=False):
                names = {group.prompt.id for group in sampled.groups}
                self.new_dropped |= {
                    name for name, *_ in scheduler.inference.offered if name not in names
                }
        return [sampled.groups for sampled in found[: self.dp]]

    def check_trained(self, groups) -> None:
        names = [group.prompt.id for group in groups]
        assert len(set(names)) == len(names) and not self.trained.keys() & set(names), (
            "a prompt is trained on twice"
        )
        due = [scheduler.inference.due for scheduler in self.ranks[: self.dp]]
        assert {name for each in due for name in each[: PER_STEP // self.dp]} <= set(names), (
            "too old for the next step"
        )
        self.late = {name for each in due for name in each[PER_STEP // self.dp :]}
        for group in groups:
            assert {self.step - r.oldest_version for r in group.rollouts} <= set(
                range(self.cfg.rollout.max_staleness + 1)
            )
        self.trained |= dict.fromkeys(names, self.step)
        self.dropped |= self.new_dropped

    @rule(dp=st.sampled_from([1, 2, 3]))
    def kill(self, dp: int) -> None:
        self.resume(self.saved, dp)

    @rule()
    def checkpoint(self) -> None:
        self.save("saved", is_step_done=True)

    @invariant()
    def no_prompt_is_lost(self) -> None:
        if not hasattr(self, "ranks"):
            return
        source = self.ranks[-1].prompts
        waiting = [prompt.id for prompt in (*self.ranks[-1].queue, *source.returned)]
        found = sorted([*waiting, *self.trained, *self.dropped], key=int)
        assert found == [str(number) for number in range(source.position)]
        ahead = self.cfg.rollout.steps_ahead * PER_STEP
        over = (
            num_prompts(self.cfg, self.dp) - PER_STEP if self.cfg.rollout.partial == "resume" else 0
        )
        assert len(self.ranks[-1].queue) <= ahead + over, (
            "more is sampled ahead than can be trained on in time"
        )

    def count(self, name: str) -> int:
        return sum(
            getattr(s.inference.client.counters, f"{name}_samples") for s in self.ranks[: self.dp]
        )

    @property
    def lost(self) -> int:
        return sum(scheduler.inference.lost for scheduler in self.ranks)


@pytest.mark.parametrize("mode", range(len(MODES)), ids=[str(mode) for mode in MODES])
def test_no_prompt_is_lost_or_trained_twice_and_the_budget_holds_whatever_happens(mode):
    runs = type(f"Runs{mode}", (Runs,), {"mode": mode})
    run_state_machine_as_test(
        runs,
        settings=settings(
            max_examples=25,
            stateful_step_count=8,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking takes minutes
        ),
    )
    assert runs.steps > 10 and (runs.due > 0 or not MODES[mode].get("max_staleness")), (
        "age is not tested"
    )
