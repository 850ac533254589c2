"""Seconds of one step: old-logprob passes and updates on the slowest pipeline stage, weight sync,
and sampling (server_time.py).

A micro-batch takes, in every layer, matrix products, grouped products of experts, attention, bytes
through device memory, collectives of tensor, expert and context parallelism, and a fixed time.  A
pass adds pipeline bubbles; an update adds gradient reduction and the optimizer.  Nothing overlaps:
a time is a sum.  Equations: docs/design/cost_model.md.

t: rows of a micro-batch on one context-parallel rank; h: hidden size; n: ranks of a group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, mul

from megatron_rl.config import Config
from megatron_rl.models.cost import attention_width, layer_weights
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan import activations, grid, memory
from megatron_rl.plan.adam_bytes import adam_bytes
from megatron_rl.plan.adapter_sizes import sent_parameters
from megatron_rl.plan.grid import dp_size, expert_dp_size, weight_holders, weight_sources
from megatron_rl.plan.hardware import Assumptions, Hardware, Rates
from megatron_rl.plan.lengths import lengths_of
from megatron_rl.plan.server_time import SERVED, DecodeModel, SamplingTime, ServerPlan


@dataclass(frozen=True)
class Parts:
    """Seconds of a rank by cause."""

    matrices: float = 0.0
    """Matrix products, without those of experts."""
    experts: float = 0.0
    """Grouped matrix products of experts."""
    attention: float = 0.0
    memory: float = 0.0
    """Bytes through device memory: norms, rotations, permutations, logits."""
    tensor: float = 0.0
    """Collectives of tensor parallelism."""
    exchange: float = 0.0
    """All-to-all of experts."""
    context: float = 0.0
    """Keys and values around the context-parallel ring."""
    layers: float = 0.0
    """Launches of kernels."""
    waiting: float = 0.0
    """Waits for other pipeline stages and other replicas."""
    gradients: float = 0.0
    """Reduction of gradients and gathering of parameters over replicas."""
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> Parts:
        return Parts(*(value * factor for value in vars(self).values()))

    def largest(self) -> str:
        """Return the four largest parts with their fractions of the total, as text."""
        parts = sorted(
            ((value, name) for name, value in vars(self).items() if value > 0), reverse=True
        )[:4]
        return ", ".join(f"{name} {value / self.total:.0%}" for value, name in parts)


BACKWARD = Parts(2, 2, 2, 2, 1.5, 1, 2, 2)
"""Backward time / forward time of every part: two products for every one, inputs gathered again
under sequence parallelism, the same all-to-all, KV and its gradient around the ring."""


@dataclass(frozen=True)
class Tokens:
    """The sequences of a mini-batch, over all replicas."""

    sequences: float
    """Number of sequences."""
    mean: float
    """Mean length E[S] in tokens."""
    squared: float
    """E[S^2] / E[S]: causal attention of a token covers half of it on average."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    rollout: SamplingTime
    old_logprob: Parts
    """All old-logprob passes of the step."""
    update: Parts
    """All updates of the step."""
    weight_sync: float
    overlaps: bool
    """True: the rollout runs while the previous step trains."""

    @property
    def total(self) -> float:
        trained = self.old_logprob.total + self.update.total
        both = max(self.rollout.total, trained) if self.overlaps else self.rollout.total + trained
        return both + self.weight_sync


@dataclass(frozen=True)
class TrainingModel:
    """The time of one configuration of one model on `world` trainer ranks of one kind of device."""

    spec: ModelSpec
    cfg: Config
    world: int
    hardware: Hardware
    assumed: Assumptions

    def step(self, servers: ServerPlan) -> StepTime:
        """Return the time of a step.  Raises ValueError if the servers cannot hold the model."""
        decoding = DecodeModel(self.spec, servers, self.hardware, self.assumed)
        rollout, overlaps = decoding.sample(self.cfg), bool(self.cfg.rollout.steps_ahead)
        return StepTime(rollout, *self.training(), self.weight_sync(), overlaps)

    def training(self) -> tuple[Parts, Parts]:
        """Return the time of the old-logprob passes and of the updates of a step."""
        num, loss = self.cfg.run.num_mini_batches, self.cfg.loss
        # a reference policy and loss.router_shift each add a forward pass per mini-batch
        passes = num * (1 + bool(loss.kl_coef) + loss.switches.router_shift)
        return self.old_logprob(self.tokens) * passes, self.update(self.tokens) * num

    @cached_property
    def tokens(self) -> Tokens:
        """The sequences of one mini-batch."""
        run, lengths = self.cfg.run, lengths_of(self.cfg, self.assumed)
        prompt = self.assumed.mean_prompt * self.cfg.data.max_prompt_tokens
        mean = prompt + lengths.mean
        squared = prompt**2 + 2 * prompt * lengths.mean + lengths.second_moment
        sequences = run.prompts_per_step * run.group_size / run.num_mini_batches
        return Tokens(sequences, mean, squared / mean)

    def old_logprob(self, tokens: Tokens) -> Parts:
        """Return the time of the forward passes of one mini-batch."""
        stages = self.stages(tokens, training=False)
        return self._pipelined(stages, tokens, interleaved=1)

    def update(self, tokens: Tokens) -> Parts:
        """Return the time of one optimizer step: forward, backward, recompute, reduction, Adam."""
        stages = self.stages(tokens, training=True)
        passes = self._pipelined(stages, tokens, interleaved=self.cfg.parallel.vp)
        forward = self.stages(tokens, training=False)
        once = [
            self._gradients(pp, both.total - one.total)
            for pp, (both, one) in enumerate(zip(stages, forward, strict=True))
        ]
        return passes + max(once, key=lambda parts: parts.total)

    def weight_sync(self) -> float:
        """Return the time of a weight sync.

        Servers load one bucket after another, which a broadcast sends to all of them; meanwhile a
        source prepares its next bucket.
        """
        spec, rates, parallel = self.spec, self.rates, self.cfg.parallel
        size, sources = self.sync_bytes, weight_sources(self.cfg)
        if self.cfg.rollout.weight_sync == "adapter":  # one call, nothing beside its tensors
            return size / rates.network
        sent = {
            "distributed": size / rates.network,
            "disk": 2 * size / self.assumed.disk,  # written, then read
            "colocated": size / rates.memory,
        }[self.cfg.rollout.weight_sync]
        # gate, up and down of every expert, and about a dozen other tensors of a layer
        tensors = 3 * len(spec.moe_layers) * spec.num_experts + 12 * spec.num_layers
        sent += tensors * self.assumed.server_tensor_seconds
        is_sharded = parallel.tp > 1 or parallel.expert_tp > 1
        gathered = size / (rates.link(parallel.tp) if is_sharded else rates.memory)
        # from ranks that do not send themselves
        moved = (1 - sources / weight_holders(parallel)) * size / rates.link(self.world)
        prepared = (gathered + moved + tensors * self.assumed.tensor_seconds) / sources
        # a source prepares its next bucket while the others send: only the rest is waited for
        return sent + max(0.0, prepared - sent * (sources - 1) / sources)

    @property
    def sync_bytes(self) -> int:
        """Bytes of one copy of what is sent; every source sends 1 / sources of them."""
        if self.cfg.rollout.weight_sync == "adapter":
            return SERVED * sent_parameters(self.spec, self.cfg.lora)
        return SERVED * memory.full_model(self.spec).total

    @cached_property
    def rates(self) -> Rates:
        return Rates(self.hardware, self.assumed)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states."""
        return self.spec.hidden_size * grid.element_size(self.cfg)

    def micro_batches(self, tokens: Tokens) -> float:
        """Return the mean number of micro-batches of a replica, which need not be whole."""
        full = self.cfg.run.max_tokens_per_micro_batch * self.assumed.fill
        return max(1.0, self._replica_tokens(tokens) / full)

    def rows(self, tokens: Tokens) -> float:
        """Return t, the mean number of rows of a micro-batch on a context-parallel rank."""
        return self._replica_tokens(tokens) / self.micro_batches(tokens) / self.cfg.parallel.cp

    def _replica_tokens(self, tokens: Tokens) -> float:
        return tokens.sequences * tokens.mean / dp_size(self.cfg.parallel, self.world)

    def stages(self, tokens: Tokens, *, training: bool) -> list[Parts]:
        """Return the time of one micro-batch on every pipeline rank.

        training: with backward and recompute.
        """
        t, pp = self.rows(tokens), self.cfg.parallel.pp
        of_kind: dict[tuple[bool, str], Parts] = {}
        for is_moe in (False, True):
            layer, experts = self.layer(t, tokens.squared, is_moe=is_moe)
            for what, again in (("", Parts()), ("experts", experts), ("layer", layer)):
                of_kind[is_moe, what] = layer + backward(layer) + again if training else layer
        stages = [Parts()] * pp
        for number, chunk in enumerate(grid.stage_layers(self.spec, self.cfg.parallel)):
            kinds = Counter(
                (layer in self.spec.moe_layers, activations.recomputed(self.cfg.model, place))
                for place, layer in enumerate(chunk)
            )
            for kind, count in kinds.items():
                stages[number % pp] += of_kind[kind] * count
        stages[-1] += self.head(t, training=training)  # never recomputed
        return stages

    def layer(self, t: float, squared: float, *, is_moe: bool) -> tuple[Parts, Parts]:
        """Return the time of a layer's forward pass, and of its MoE part alone."""
        spec, rates, tp = self.spec, self.rates, self.cfg.parallel.tp
        dense, routed = layer_weights(spec, is_moe=is_moe)
        layer_bytes, expert_bytes = activations.moved_bytes(
            spec, self.cfg, is_moe=is_moe, num_rows=round(t)
        )
        experts = Parts()
        if is_moe:
            # weights of shared experts and of the router
            shared = spec.hidden_size * (3 * spec.shared_ffn_size + spec.num_experts)
            local = memory.layer_parameters(spec, self.cfg.parallel, is_moe=True).experts
            read = local * grid.element_size(self.cfg) / rates.memory
            experts = Parts(
                matrices=2 * shared * t / tp / rates.matrices,
                experts=max(2 * routed * t / tp / rates.experts, read),
                memory=2 * expert_bytes / rates.memory,
                exchange=self._exchange(t),
                tensor=self._sequence_gather(t) if spec.shared_ffn_size else 0.0,
            )
            # layer_weights counts them as dense, but selective recompute includes them
            dense -= shared
        other = Parts(
            matrices=2 * dense * t / tp / rates.matrices,
            attention=attention_width(spec) * squared * t / tp / rates.attention,
            memory=2 * (layer_bytes - expert_bytes) / rates.memory,
            tensor=self._sequence_gather(t) * (1 if is_moe else 2),
            context=self._ring(t),
            layers=self.assumed.layer_seconds,
        )
        return other + experts, experts

    def head(self, t: float, *, training: bool) -> Parts:
        """Return the time of the LM head and the log-probs."""
        columns = padded_vocab_size(self.spec, self.cfg.parallel.tp) / self.cfg.parallel.tp
        # the fused form computes the logits again for backward
        products = (4 if self.cfg.model.fused_lm_head else 3) if training else 1
        # bytes through memory for each logit: the passes of engine/shards.py over its chunks in
        # float32, counted by `megatron-rl rehearse`
        num_bytes = 76 if training else 44
        return Parts(
            matrices=2 * products * t * columns * self.spec.hidden_size / self.rates.matrices,
            memory=num_bytes * t * columns / self.rates.memory,
        )

    def _pipelined(self, stages: list[Parts], tokens: Tokens, *, interleaved: int) -> Parts:
        """Return the time of all micro-batches on the slowest stage, with its waits for the other
        stages to fill and drain.
        """
        slowest = max(stages, key=lambda parts: parts.total)
        work = slowest * self.micro_batches(tokens)
        others = sum(stage.total for stage in stages) - slowest.total
        waiting = others / interleaved + self._hops(tokens)
        if dp_size(self.cfg.parallel, self.world) > 1:
            # replicas wait at the gradient reduction
            waiting += work.total * (1 / self.assumed.lockstep - 1)
        return replace(work, waiting=waiting)

    def _hops(self, tokens: Tokens) -> float:
        """Return the time in which a micro-batch's rows pass from stage to stage, both ways."""
        parallel = self.cfg.parallel
        sent = self.rows(tokens) * self.row_bytes / parallel.tp
        return 2 * (parallel.pp * parallel.vp - 1) * sent / self.rates.link(self.world)

    def _sequence_gather(self, t: float) -> float:
        """Return the time in which tensor ranks gather rows before a block and reduce-scatter sums
        after it: t h (n - 1) / n numbers each.
        """
        tp = self.cfg.parallel.tp
        return 2 * t * self.row_bytes * (tp - 1) / tp / self.rates.link(tp)

    def _exchange(self, t: float) -> float:
        """Return the time in which every row goes to its k experts and back.

        It is the longer of the times within a node and between nodes.
        """
        parallel, rates, etp = self.cfg.parallel, self.rates, self.cfg.parallel.expert_tp
        size = 2 * t / parallel.tp * self.spec.top_k * self.row_bytes
        # expert ranks within a node, which tensor ranks of an expert fill first
        near = min(parallel.ep, max(1, rates.per_node // etp))
        inside, outside = size * (near - 1) / parallel.ep, size * (parallel.ep - near) / parallel.ep
        # every tensor rank of an expert gets all rows
        gathered = size * (etp - 1) / rates.link(etp)
        return max(inside / rates.nvlink, outside / rates.network) + gathered

    def _ring(self, t: float) -> float:
        """Return the time in which a rank gets the keys and values of the other context ranks."""
        parallel, spec = self.cfg.parallel, self.spec
        numbers = t * 2 * spec.num_kv_heads * spec.head_dim
        size = numbers * grid.element_size(self.cfg) / parallel.tp
        return (parallel.cp - 1) * size / self.rates.link(parallel.tp * parallel.cp)

    def _gradients(self, pp_rank: int, backward: float) -> Parts:
        """Return the time of the gradient reduction and of the optimizer.

        float32 gradients of what is trained are reduce-scattered and parameters gathered over the
        copies of every parameter, or gradients all-reduced without optim.distributed; then Adam
        updates the owned ones.  With overlap_grad_reduce the first stage
        reduces during `backward`, the seconds of a micro-batch, except the embedding's gradient,
        which comes last; core does not cut the other stages' gradients into buckets.
        """
        parallel, size = self.cfg.parallel, grid.element_size(self.cfg)
        total = memory.trained_parameters(self.spec, self.cfg, pp_rank)
        copies = dp_size(parallel, self.world) * parallel.cp
        expert_copies = expert_dp_size(parallel, self.world)
        moved = total.dense * (copies - 1) / copies
        moved += total.experts * (expert_copies - 1) / expert_copies
        owned: float = total.total
        if self.cfg.optim.distributed:
            owned = total.dense / copies + total.experts / expert_copies
        # moments and weights are read and written; norm and clip read and write gradients
        touched = 2 * 12 * owned + 2 * 4 * total.total
        link = self.rates.link(self.world // parallel.pp)
        reduced, gathered = moved * adam_bytes(self.cfg).gradient / link, moved * size / link
        if not self.cfg.optim.distributed:  # an all-reduce, and every rank has all parameters
            reduced, gathered = 2 * reduced, 0.0
        if self.cfg.overlaps_grad_reduce and pp_rank == 0:
            columns = padded_vocab_size(self.spec, parallel.tp) / parallel.tp
            # with adapters it has none, or a small one of its adapter
            share = 0.0 if self.cfg.lora.rank else columns * self.spec.hidden_size / total.total
            reduced = max(reduced - backward, share * reduced)
        return Parts(
            gradients=reduced + gathered,
            optimizer=touched / self.rates.memory + self.host_adam(pp_rank),
        )

    def host_adam(self, pp_rank: int) -> float:
        """Return the time of an update of Adam on the host, with optimizer_cpu_offload.

        Gradients and weights in float32 pass the link of each device.  Then the ranks of a node
        share its memory: torch's fused Adam reads 16 bytes per parameter and writes 12.
        """
        state, hardware = 16, self.hardware
        owned = memory.host_optimizer_bytes(self.spec, self.cfg, self.world, pp_rank) / state
        if not owned or not hardware.host_link:
            return 0.0
        ranks, share = min(self.world, hardware.per_node), self.assumed.bandwidth
        linked = (4 + 4) * owned / (hardware.host_link * share)
        return linked + 28 * owned * ranks / (hardware.host_bandwidth * share)


def backward(forward: Parts) -> Parts:
    """Return the backward time of every part."""
    return Parts(*map(mul, vars(forward).values(), vars(BACKWARD).values()))
