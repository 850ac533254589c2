"""A tiny mixture of experts in the real training engine, in float64: log-probs and gradients of
every step, with the routes of any policy replayed by the replay manager.

Shapes: n prefixes, P parameters, S tokens of a sequence, L MoE layers, K top-k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.exact_bias.responses import (
    END,
    GOING_ON,
    LONGEST,
    PROMPTS,
    VOCAB,
    Prefix,
    all_prefixes,
)
from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch, PackedBatch
from megatron_rl.weights.hf.fp8 import round_to_fp8
from tests.dist.engines import make_engine
from tests.tiny import random_checkpoint

LAYERS, EXPERTS, TOP_K = 2, 8, 2
SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
    num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_experts=EXPERTS, num_experts_per_tok=TOP_K,
)  # fmt: skip
KEEP = ("*embedding*", "*output_layer*", "*router*", "*norm*")
"""core's names of what rollout.quantize = "fp8" leaves alone by default."""

Weights = dict[str, Tensor]
Routes = tuple[np.ndarray, ...]
"""The experts [S - 1, L, K] of every carrier."""


@dataclass(frozen=True)
class Step:
    """All steps of one policy: its weights and the routes that were replayed."""

    logprobs: Tensor
    """float64 [n, 8]."""
    gradient: Tensor
    """float64 [n * 8, P], of every log-prob."""


def carriers() -> list[Prefix]:
    """Return (index of the prompt, ids) of the sequences that contain every prefix: two ids other
    than END, and an END in the last place, where no prefix ends.
    """
    return [
        (prompt, (*ids, END))
        for prompt in range(len(PROMPTS))
        for ids in itertools.product(GOING_ON, repeat=LONGEST - 1)
    ]


def places() -> dict[Prefix, tuple[int, int]]:
    """Return, for every prefix, the first carrier that begins with it, and its length."""
    first: dict[Prefix, tuple[int, int]] = {}
    for index, (prompt, ids) in enumerate(carriers()):
        for position in range(LONGEST):
            first.setdefault((prompt, ids[:position]), (index, position))
    return first


class Policy:
    """The engine's model with weights that can be set.  The gradient is that of all parameters in
    the order of `names`.

    dtype: of the computation.  The engine's own end at float32, so it steps only at that.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype = torch.float64) -> None:
        self.engine = engine
        (self._model,) = engine.chunks
        self._model.to(dtype)
        parameters = dict(self._model.named_parameters())
        self.names = sorted(parameters)
        self._parameters = [parameters[name] for name in self.names]
        first = places()
        self._places = [first[prefix] for prefix in all_prefixes()]

    @property
    def weights(self) -> Weights:
        return {
            name: parameter.detach().clone()
            for name, parameter in zip(self.names, self._parameters, strict=True)
        }

    @weights.setter
    def weights(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in zip(self.names, self._parameters, strict=True):
                parameter.copy_(weights[name])

    def random_weights(self, seed: int) -> Weights:
        """Draw matrices of standard deviation fan_in^-1/2, with clear routing; norms are 1."""
        generator = torch.Generator().manual_seed(seed)

        def draw(name: str, shape: torch.Size) -> Tensor:
            if len(shape) == 1:
                return torch.ones(shape, dtype=torch.float64)
            scale = 1.0 if "embedding" in name else shape[-1] ** -0.5
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        shapes = ((name, parameter.shape) for name, parameter in self.weights.items())
        return {name: draw(name, shape) for name, shape in shapes}

    def moved(self, weights: Weights, direction: Tensor, length: float) -> Weights:
        """Return the weights after a move of `length` along `direction` [P]."""
        parts = (direction * (length / direction.norm())).split(
            [weights[name].numel() for name in self.names]
        )
        return {
            name: weights[name] + part.view_as(weights[name])
            for name, part in zip(self.names, parts, strict=True)
        }

    def live_routes(self) -> Routes:
        """Return the experts that the routers choose, from the engine's recording pass (R2)."""
        old = self.engine.old_logprobs(self.batch(), MetricSums(), replay="R2")
        assert old.recorded is not None
        return tuple(ids.transpose(0, 1).numpy()[:-1].copy() for ids in old.recorded)

    def logprobs(self, routes: Routes | None, *, gap: bool = False) -> Tensor:
        """Return the log-probs of all steps [n, 8].

        routes: None for live routing.  gap: the row that predicts a third token has no route.
        """
        with torch.no_grad():
            logits = self._logits(routes, gap)
        rows = [logits[index][position] for index, position in self._places]
        return torch.stack(rows).log_softmax(-1)

    def steps(self, routes: Routes | None, *, gap: bool = False) -> Step:
        """Return log-probs and gradients of all steps, with the arguments of `logprobs`."""
        logits = self._logits(routes, gap)
        rows, gradients = [], []
        for index, position in self._places:
            row = logits[index][position].log_softmax(-1)
            rows.append(row.detach())
            gradients += [self._flat(value) for value in row]
        return Step(torch.stack(rows), torch.stack(gradients))

    def gradient(self, coefficients: Tensor) -> Tensor:
        """Return the gradient [P] of sum(coefficients [n, 8] * log-probs), with live routing."""
        logits = self._logits(None)
        rows = torch.stack([logits[index][position] for index, position in self._places])
        return self._flat((coefficients * rows.log_softmax(-1)).sum())

    def _flat(self, value: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            value, self._parameters, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        return torch.cat([part.flatten() for part in parts])

    def _logits(self, routes: Routes | None, gap: bool = False) -> list[Tensor]:
        """Return the logits [3, 8] that predict the response's tokens, for every carrier."""
        engine, batch = self.engine, self.batch(routes, gap)
        start, kept = len(PROMPTS[0]) - 1, []

        def keep(index: int, part: PackedBatch, output: Tensor) -> Tensor:
            kept.append(output.flatten(0, 1)[start : start + LONGEST])
            return output.sum()  # the schedule needs a scalar; nothing reads it

        replayed = engine._rollout_routes.of(batch, replay=routes is not None, compare=False)
        engine._set_mode(training=False)
        with engine.manager.run_pass(replayed, training=False):
            engine._pipeline.run(engine._to_device(batch), keep, training=False)
        return kept

    def batch(self, routes: Routes | None = None, gap: bool = False) -> MiniBatch:
        """Return the carriers, one sequence a micro-batch, with these routes."""
        missing = None
        if gap:
            missing = np.arange(len(PROMPTS[0]) + LONGEST - 1) == len(PROMPTS[0]) + LONGEST - 2
        samples = [
            make_sample(
                f"{index}",
                prompt,
                ids,
                routes=None if routes is None else routes[index],
                missing=missing,
            )
            for index, (prompt, ids) in enumerate(carriers())
        ]
        length = len(samples[0].rollout.tokens)
        return make_mini_batch(
            samples, max_tokens=length, rule=self.engine.pack_rule, dp_group=None
        )


def make_sample(
    name: str,
    prompt: int,
    ids: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    routes: np.ndarray | None = None,
    missing: np.ndarray | None = None,
    advantage: float = 0.0,
) -> Sample:
    """Return a response as the engine takes it; without `logprobs` they are 0."""
    tokens = np.array([*PROMPTS[prompt], *ids])
    if routes is None:
        shape = (len(tokens) - 1, LAYERS, TOP_K)
        routes = np.broadcast_to(np.arange(TOP_K, dtype=np.uint8), shape)
    rollout = Rollout(
        id=name,
        tokens=tokens,
        prompt_length=len(PROMPTS[prompt]),
        rollout_logprobs=np.array(logprobs or [0.0] * len(ids), np.float32),
        routed_experts=routes,
        missing_routes=missing,
        finish_reason="stop",
        policy_versions=np.zeros(len(ids), np.int32),
    )
    return Sample(rollout, advantage)


class Float64Softmax(TorchFunctionMode):
    """Keeps softmax in float64: core's routers compute it in float32, whatever their dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.softmax and args[0].dtype is torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def one_rank(folder: Path) -> Iterator[Policy]:
    """Make a policy in this process, which is the only rank.  `folder` gets its checkpoint, which
    gives the shapes alone.
    """
    checkpoint = random_checkpoint(folder / "model", **SIZES)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = make_engine(
            checkpoint, model={"router_dtype": "fp64"}, optim={"clip_grad": 1e9}, measure=False
        )
        try:
            with Float64Softmax():
                yield Policy(engine)
        finally:
            engine.parallel.destroy()
    finally:
        dist.destroy_process_group()


def rounded(weights: Weights, precision: str) -> Weights:
    """Return the weights as a sampler of this precision has them.

    fp32, bf16: every tensor.  fp8: the matrices that rollout.quantize = "fp8" rounds, with one
    scale per matrix of core, which has no block of 128 x 128 here.
    """
    if precision == "exact":
        return weights
    if precision == "fp8":
        return {name: round_to_fp8(name, w, KEEP).double() for name, w in weights.items()}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return {name: w.to(dtype).double() for name, w in weights.items()}
