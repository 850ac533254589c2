"""The trainer's half: the project's engine on one rank, its log-probs and its live choices.

Shapes: S tokens of a sequence, R sampled, L MoE layers, K top-k, E experts; T packed rows of a
micro-batch.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.model import moe_routers
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch, Sample
from megatron_rl_tools.verify_replay.router_kinds import live_choice, selection_scores

Edit = Callable[[Engine], AbstractContextManager[object]]
"""A change of the trainer that is undone at the end of the context."""


@dataclass(frozen=True)
class Half:
    """The trainer's half of one sequence."""

    logprobs: np.ndarray
    """log pi of the sampled tokens, float32 [R]."""
    routes: np.ndarray
    """The routers' live choices, given the outputs of the layers below, int64 [S - 1, L, K]."""
    gap: np.ndarray
    """Lowest chosen score minus the lowest score of the server's experts, float32 [S - 1, L]; 0
    where both chose the same set, and where the server returned no route."""
    margin: np.ndarray
    """Lowest chosen score minus the best score not chosen, float32 [S - 1, L]."""


def logprobs(halves: Sequence[Half]) -> list[np.ndarray]:
    return [half.logprobs for half in halves]


class TrainerSide:
    """An engine with the configuration `cfg`, on this rank alone."""

    def __init__(self, cfg: Config, parallel: Parallel) -> None:
        self.cfg, self.parallel = cfg, parallel
        self.engine = Engine(cfg, parallel, total_updates=1)
        self.spec = self.engine.spec

    def forward(
        self, rollouts: Sequence[Rollout], *, replay: bool, edit: Edit | None = None
    ) -> list[Half]:
        """Return log-probs and routes of every sequence, in order.

        replay: whether the routers replay the rollouts' routes (R3).
        """
        engine = self.engine
        samples = [Sample(rollout, 0.0) for rollout in rollouts]
        with (edit or (lambda _: nullcontext()))(engine), RouterScores(engine) as scores:
            batch = make_mini_batch(
                samples,
                max_tokens=self.cfg.run.max_tokens_per_micro_batch,
                rule=engine.pack_rule,
                dp_group=self.parallel.dp_group,
            )
            old = engine.old_logprobs(batch, MetricSums(), replay="R3" if replay else "none")
        values = [part.cpu().numpy() for part in old.logprobs]
        return self._halves(rollouts, batch, values, scores)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor) of every parameter."""
        for name, tensor in self.engine.export():
            if tensor is not None:
                yield name, tensor

    def _halves(
        self,
        rollouts: Sequence[Rollout],
        batch: MiniBatch,
        logprobs: Sequence[np.ndarray],
        scores: RouterScores,
    ) -> list[Half]:
        halves: dict[str, Half] = {}
        by_id = {rollout.id: rollout for rollout in rollouts}
        pairs = zip(batch.micro_batches, logprobs, strict=True)
        for number, (micro_batch, values) in enumerate(pairs):
            starts = micro_batch.cu_seqlens.tolist()  # one more than sequences
            for name, start in zip(micro_batch.rollout_ids, starts, strict=False):
                rollout = by_id[name]
                rows = slice(start, start + len(rollout.tokens) - 1)
                routes, gap, margin = scores.of(number, rows, rollout)
                sampled = values[start + rollout.sampled - 1].astype(np.float32)
                halves[name] = Half(sampled, routes, gap, margin)
        return [halves[rollout.id] for rollout in rollouts]


class RouterScores:
    """Collects, in every forward, the scores by which every router selects."""

    def __init__(self, engine: Engine) -> None:
        self.kind, self.top_k = engine.spec.router, engine.spec.top_k
        self.routers = moe_routers(engine.chunks)
        self.calls: list[list[torch.Tensor]] = [[] for _ in self.routers]
        self.biases: list[torch.Tensor | None] = [router.expert_bias for _, router in self.routers]

    def __enter__(self) -> RouterScores:
        self.hooks = [
            router.register_forward_hook(self._keep(number))
            for number, (_, router) in enumerate(self.routers)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, number: int) -> Any:
        def after(router: Any, inputs: tuple[torch.Tensor, ...], outputs: object) -> None:
            with torch.no_grad():
                logits = router.gating(inputs[0].detach())
                self.calls[number].append(logits.view(-1, logits.shape[-1]).float().cpu())
                self.biases[number] = (
                    None
                    if router.expert_bias is None
                    else router.expert_bias.detach().float().cpu().clone()
                )

        return after

    def of(
        self, micro_batch: int, rows: slice, rollout: Rollout
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (routes, gap, margin) of these rows of a micro-batch; see Half."""
        served, missing = rollout.routed_experts, rollout.missing_routes
        routes, gaps, margins = [], [], []
        for layer, (calls, bias) in enumerate(zip(self.calls, self.biases, strict=True)):
            logits = calls[micro_batch][rows]
            scores = selection_scores(logits, self.kind, bias)
            chosen = live_choice(logits, self.kind, bias, self.top_k)
            lowest = scores.gather(1, chosen).amin(1)
            margins.append(lowest - scores.scatter(1, chosen, -torch.inf).amax(1))
            gap = torch.zeros(len(chosen))
            if served is not None:
                theirs = torch.from_numpy(served[:, layer].astype(np.int64))
                same = (chosen[:, :, None] == theirs[:, None]).any(1).all(1)
                if missing is not None:  # their ids are meaningless
                    same |= torch.from_numpy(missing)
                    theirs[torch.from_numpy(missing)] = 0
                gap = torch.where(
                    same, 0.0, (lowest - scores.gather(1, theirs).amin(1)).clamp(min=0.0)
                )
            routes.append(chosen)
            gaps.append(gap)
        if not routes:  # a dense model
            size = rows.stop - rows.start
            empty = np.zeros((size, 0), np.float32)
            return np.zeros((size, 0, 0), np.int64), empty, empty
        return (
            torch.stack(routes, 1).numpy(),
            torch.stack(gaps, 1).numpy().astype(np.float32),
            torch.stack(margins, 1).numpy().astype(np.float32),
        )


@contextmanager
def another_trainer(cfg: Config, parallel: Parallel, **model: object) -> Iterator[TrainerSide]:
    """A trainer with other keys of [model], whose memory is freed afterwards."""
    changed = cfg.model_copy(update={"model": cfg.model.model_copy(update=model)})
    side = TrainerSide(changed, parallel)
    try:
        yield side
    finally:
        del side
        gc.collect()


def with_routes(
    rollouts: Sequence[Rollout],
    routes: Sequence[np.ndarray],
    move: Callable[[np.ndarray], np.ndarray],
) -> list[Rollout]:
    """Return the rollouts with these routes, each [S - 1, L, K].

    move: applied to the flags of rows without a route, so that they move as the rows do.
    """
    return [
        replace(
            rollout,
            routed_experts=ids,
            missing_routes=None if (flags := rollout.missing_routes) is None else move(flags),
            routes_digest=None,
        )
        for rollout, ids in zip(rollouts, routes, strict=True)
    ]


def linked_checkpoint(folder: Path, source: Path, config: Mapping[str, object]) -> Path:
    """Make a folder with the tensors of `source` and another config.json; the caller removes it."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return folder
