"""The servers as the job uses them: sample from them, push to them, and go on when one of them dies.

Every call is collective: all ranks call it at the same place.  Leaders sample, rank 0 pushes and owns the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_rl.batch.split import agree
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.parallel import from_rank_0
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client import RolloutClient, RolloutError
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.weights.push import WeightPusher, WeightPushError


@dataclass
class Serving:
    """client: on leaders of replicas; pusher: on rank 0; fleet: the servers this run started, on rank 0, not with rollout.urls.

    `urls` are the servers that hold weights `version`: nobody samples from another one.
    """

    engine: Engine
    client: RolloutClient | None
    pusher: WeightPusher | None
    fleet: Fleet | None
    urls: Sequence[str]
    say: Callable[[str], None]
    version: int = 0

    @property
    def restarts(self) -> int:
        """Servers replaced since the run started; 0 off rank 0."""
        return 0 if self.fleet is None else self.fleet.restarts

    def push(self, version: int) -> None:
        """Give the servers the current weights as `version`; on return all that are sampled from have confirmed it.

        Of the servers this run started these are the ones that answer now.  When one dies during the push, the others get
        the weights once more.
        """
        while not self._push_once(version):
            pass
        self.version = version
        if self.client is not None:
            self.client.set_urls(self.urls)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        id_prefix: str = "",
        keep: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[RolloutGroup]:
        """RolloutClient.generate for this replica's `prompts`, from the weights pushed last; [] on ranks that do not lead one.

        When servers of ours died, so that a replica could not be served, the current weights are pushed to those that are
        there (again) and what is missing is sampled from them.  Raises RolloutError when that cannot help.
        """
        missing: list[Prompt] = list(prompts)
        done: list[RolloutGroup] = []

        def take(group: RolloutGroup) -> None:
            missing.remove(group.prompt)
            done.append(group)
            on_progress()

        while True:
            failure = None
            if self.client is not None and missing:
                try:
                    self.client.generate(
                        list(missing),
                        group_size,
                        temperature=temperature,
                        max_tokens=max_tokens,
                        stop_token_ids=stop_token_ids,
                        policy_version=self.version,
                        id_prefix=id_prefix,
                        on_progress=take,
                        keep=None if keep is None else keep - len(done),
                    )
                except RolloutError as error:
                    failure = error
            # also the barrier: waiting for the slowest replica is time spent on rollouts
            (failed,) = agree([int(failure is not None)], dist.ReduceOp.MAX, dist.group.WORLD)
            if not failed:
                return in_order(done, prompts)
            self._heal(failure)

    def _heal(self, failure: RolloutError | None) -> None:
        """After some replica's sampling failed: go on if servers of ours died, else raise."""
        gone = from_rank_0(lambda: [] if self.fleet is None else self.fleet.lost())
        if not gone:
            raise failure or RuntimeError("sampling failed on another replica")
        self.say(f"sampling goes on without {', '.join(gone)}: pushing version {self.version} again")
        self.push(self.version)

    def _push_once(self, version: int) -> bool:
        """Whether `urls` all hold the weights now; False when one of ours died meanwhile.  Nobody samples before this returns."""
        self.urls = from_rank_0(lambda: list(self.urls) if self.fleet is None else self.fleet.take())
        tensors = iter(self.engine.export())

        def send() -> bool:
            assert self.pusher is not None
            self.pusher.set_urls(self.urls)
            try:
                self.pusher.push(tensors, version)
            except WeightPushError as error:
                drain(tensors)
                if self.fleet is None or not (gone := self.fleet.lost()):
                    raise
                self.say(f"push of version {version}: {', '.join(gone)} died ({error}); pushing to the others again")
                return False
            return True

        if self.pusher is None:
            drain(tensors)  # every rank takes part in the export
        return from_rank_0(send)

    def release_memory(self) -> None:
        """Until the next push the servers have no GPU memory and serve nothing."""

        def release() -> None:
            assert self.pusher is not None
            try:
                self.pusher.release_memory()
            except WeightPushError:
                if self.fleet is None or not (gone := self.fleet.lost()):
                    raise
                self.pusher.set_urls([url for url in self.urls if url not in gone])  # the next push heals what replaces them
                self.pusher.release_memory()

        from_rank_0(release)


def in_order(groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """`groups` as their `prompts` come, without those that have none.  A prompt may come twice, as its groups then do."""
    waiting: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        waiting.setdefault(group.prompt.id, []).append(group)
    return [waiting[prompt.id].pop(0) for prompt in prompts if waiting.get(prompt.id)]


def drain(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass
