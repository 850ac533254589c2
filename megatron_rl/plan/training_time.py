"""Seconds of the old-logprob passes and of an update on the slowest pipeline stage, from FLOPs, bytes and link rates.

Counted per micro-batch and layer: matrix products, products of experts, attention, bytes that pass through device memory, the
collectives of tensor, expert and context parallelism, a fixed cost per layer; per pass: the pipeline's waiting; per update:
gradients' reduction and the optimizer.  Nothing overlaps anything: a time is a sum.  Equations: docs/design/cost_model.md.
Letters: t rows of a micro-batch on one context-parallel rank, h hidden size, n ranks of a group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import add, mul

from megatron_rl.config import Config
from megatron_rl.models.cost import attention_width, layer_weights
from megatron_rl.models.spec import ModelSpec, padded_vocab_size
from megatron_rl.plan import memory
from megatron_rl.plan.grid import dp_size, expert_dp_size
from megatron_rl.plan.hardware import Assumptions, Hardware
from megatron_rl.plan.lengths import Lengths


@dataclass(frozen=True)
class Parts:
    """Where the seconds of a rank go."""

    matrices: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, rotations, permutations, logits: bytes through device memory."""
    tensor: float = 0.0
    """Collectives of tensor parallelism."""
    exchange: float = 0.0
    """All-to-all of experts."""
    context: float = 0.0
    layers: float = 0.0
    """Starting kernels."""
    waiting: float = 0.0
    """For other pipeline stages and for other replicas."""
    gradients: float = 0.0
    """Reducing gradients and gathering parameters over replicas."""
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> Parts:
        return Parts(*(value * factor for value in vars(self).values()))

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """(part, share) of the largest ones."""
        shares = [(name, value / self.total) for name, value in vars(self).items() if value > 0]
        return sorted(shares, key=lambda item: -item[1])[:count]


BACKWARD = Parts(2, 2, 2, 2, 1.5, 1, 2, 2)
"""Of every forward part: two products for each, inputs gathered again under sequence parallelism, the same exchange, KV and its
gradient around the ring."""


@dataclass(frozen=True)
class Tokens:
    """What the replicas of a mini-batch compute: sequences, their mean number of tokens, and E[S^2] / E[S]."""

    sequences: float
    mean: float
    squared: float
    """E[S^2] / E[S]: a token's share of its sequence's causal attention is half of it in the mean."""


def tokens_of(cfg: Config, lengths: Lengths, assumed: Assumptions) -> Tokens:
    """Of one mini-batch, over all replicas."""
    sequences = cfg.run.prompts_per_step * cfg.run.group_size / cfg.run.num_mini_batches
    prompt = assumed.mean_prompt * cfg.data.max_prompt_tokens
    mean = prompt + lengths.mean
    squared = prompt**2 + 2 * prompt * lengths.mean + lengths.second_moment
    return Tokens(sequences, mean, squared / mean)


@dataclass(frozen=True)
class TrainingModel:
    """One layout of one model on one kind of device."""

    spec: ModelSpec
    cfg: Config
    world: int
    hardware: Hardware
    assumed: Assumptions

    def old_logprob(self, tokens: Tokens) -> Parts:
        """Forward passes of one mini-batch."""
        stages = self.stages(tokens, training=False)
        return self._pipelined(stages, tokens, interleaved=1)

    def update(self, tokens: Tokens) -> Parts:
        """One optimizer step: forward, backward, recomputation, reduction, Adam."""
        stages = self.stages(tokens, training=True)
        found = self._pipelined(stages, tokens, interleaved=self.cfg.parallel.vp)
        once = [self._gradients(pp) for pp in range(self.cfg.parallel.pp)]
        return found + max(once, key=lambda parts: parts.total)

    def micro_batches(self, tokens: Tokens) -> float:
        """On every replica."""
        full = self.cfg.run.max_tokens_per_micro_batch * self.assumed.fill
        share = tokens.sequences * tokens.mean / dp_size(self.cfg.parallel, self.world)
        return max(1.0, share / full)

    def rows(self, tokens: Tokens) -> float:
        """t: of a micro-batch, in the mean."""
        share = tokens.sequences * tokens.mean / dp_size(self.cfg.parallel, self.world)
        return share / self.micro_batches(tokens) / self.cfg.parallel.cp

    def stages(self, tokens: Tokens, *, training: bool) -> list[Parts]:
        """One micro-batch on each pipeline rank: forward, and where `training` backward and recomputation."""
        t, pp = self.rows(tokens), self.cfg.parallel.pp
        of_kind: dict[tuple[bool, str], Parts] = {}
        for is_moe in (False, True):
            whole, experts = self.layer(t, tokens.squared, is_moe=is_moe)
            trained = whole + backward(whole) if training else whole
            again = {"": Parts(), "experts": experts, "whole": whole} if training else {}
            of_kind |= {(is_moe, what): trained + again.get(what, Parts()) for what in ("", "experts", "whole")}
        found = [Parts()] * pp
        for number, chunk in enumerate(memory.stage_layers(self.spec, self.cfg.parallel)):
            kinds = Counter((layer in self.spec.moe_layers, self._recomputed(at)) for at, layer in enumerate(chunk))
            for kind, count in kinds.items():
                found[number % pp] += of_kind[kind] * count
        found[-1] += self.head(t, training=training)
        return found

    def layer(self, t: float, squared: float, *, is_moe: bool) -> tuple[Parts, Parts]:
        """(all of a layer's forward pass, its MoE part alone)."""
        spec, parallel, hw, assumed = self.spec, self.cfg.parallel, self.hardware, self.assumed
        dense, routed = layer_weights(spec, is_moe=is_moe)
        whole_bytes, expert_bytes = memory.layer_bytes(spec, self.cfg, is_moe=is_moe, num_rows=round(t))
        flops = hw.flops * assumed.matrices
        passed = hw.bandwidth * assumed.bandwidth
        experts = Parts()
        if is_moe:
            shared = 3 * spec.hidden_size * spec.shared_ffn_size + spec.hidden_size * spec.num_experts
            experts = Parts(
                matrices=2 * shared * t / parallel.tp / flops,
                experts=max(
                    2 * routed * t / parallel.tp / (hw.flops * assumed.experts),
                    memory.layer_parameters(spec, parallel, is_moe=True).experts
                    * memory.element_size(self.cfg)
                    / passed,
                ),
                memory=2 * expert_bytes / passed,
                exchange=self._exchange(t),
                tensor=self._sequence_gather(t) if spec.shared_ffn_size else 0.0,
            )
            dense -= shared
        rest = Parts(
            matrices=2 * dense * t / parallel.tp / flops,
            attention=attention_width(spec) * squared * t / parallel.tp / (hw.flops * assumed.attention),
            memory=2 * (whole_bytes - expert_bytes) / passed,
            tensor=self._sequence_gather(t) * (1 if is_moe else 2),
            context=self._ring(t),
            layers=assumed.layer_seconds,
        )
        return rest + experts, experts

    def head(self, t: float, *, training: bool) -> Parts:
        """LM head and log-probs: read logits, write their gradient; the fused form computes them twice."""
        columns = padded_vocab_size(self.spec, self.cfg.parallel.tp) / self.cfg.parallel.tp
        products = (4 if self.cfg.model.fused_lm_head else 3) if training else 1
        passes = 6 if training else 3  # of the logits through memory: written, read twice; read twice more, gradient
        return Parts(
            matrices=2 * products * t * columns * self.spec.hidden_size / (self.hardware.flops * self.assumed.matrices),
            memory=passes
            * t
            * columns
            * memory.element_size(self.cfg)
            / (self.hardware.bandwidth * self.assumed.bandwidth),
        )

    def _recomputed(self, number: int) -> str:
        """What of a layer's forward pass is computed again: "whole", "experts" or ""; `number`: of the layer in its chunk."""
        model = self.cfg.model
        if model.recompute == "full" or (model.recompute == "block" and number < model.recompute_layers):
            return "whole"
        return "experts" if model.recompute == "selective" else ""

    def _pipelined(self, stages: list[Parts], tokens: Tokens, *, interleaved: int) -> Parts:
        """All micro-batches through all stages: the slowest works, and waits for the others to fill and drain."""
        count = self.micro_batches(tokens)
        slowest = max(stages, key=lambda parts: parts.total)
        work = slowest * count
        waiting = (sum(each.total for each in stages) - slowest.total) / interleaved + self._hops(tokens)
        if dp_size(self.cfg.parallel, self.world) > 1:
            waiting += work.total * (1 / self.assumed.lockstep - 1)
        return replace(work, waiting=waiting)

    def _hops(self, tokens: Tokens) -> float:
        """A micro-batch's rows from stage to stage, both ways, once through the pipeline."""
        parallel = self.cfg.parallel
        sent = self.rows(tokens) * self.spec.hidden_size * memory.element_size(self.cfg) / parallel.tp
        return 2 * (parallel.pp * parallel.vp - 1) * sent / self._rate(self.world)

    def _rate(self, span: int) -> float:
        """Bytes/s of a collective over ranks that lie within `span` consecutive ones."""
        hw, assumed = self.hardware, self.assumed
        return hw.nvlink * assumed.nvlink if span <= hw.per_node else hw.network * assumed.network

    def _sequence_gather(self, t: float) -> float:
        """Tensor ranks gather their shares of the rows before, and scatter sums after: t h (n - 1) / n each."""
        tp = self.cfg.parallel.tp
        size = t * self.spec.hidden_size * memory.element_size(self.cfg) * (tp - 1) / tp
        return 2 * size / self._rate(tp)

    def _exchange(self, t: float) -> float:
        """Every row k times to its experts and back; the slower of what stays in the node and what leaves it."""
        parallel, hw, assumed = self.cfg.parallel, self.hardware, self.assumed
        size = 2 * t / parallel.tp * self.spec.top_k * self.spec.hidden_size * memory.element_size(self.cfg)
        near = min(parallel.ep, max(1, hw.per_node // parallel.expert_tp))
        inside, outside = size * (near - 1) / parallel.ep, size * (parallel.ep - near) / parallel.ep
        seconds = max(inside / (hw.nvlink * assumed.nvlink), outside / (hw.network * assumed.network))
        etp = parallel.expert_tp
        return seconds + size * (etp - 1) / self._rate(etp)

    def _ring(self, t: float) -> float:
        """Keys and values of the other context ranks."""
        parallel, spec = self.cfg.parallel, self.spec
        size = t * 2 * spec.num_kv_heads * spec.head_dim * memory.element_size(self.cfg) / parallel.tp
        return (parallel.cp - 1) * size / self._rate(parallel.tp * parallel.cp)

    def _gradients(self, pp_rank: int) -> Parts:
        """float32 gradients scattered, parameters gathered, over the copies of each; then Adam on what this rank owns."""
        parallel, size = self.cfg.parallel, memory.element_size(self.cfg)
        held = memory.rank_parameters(self.spec, parallel, pp_rank)
        copies = dp_size(parallel, self.world) * parallel.cp, expert_dp_size(parallel, self.world)
        rate = self._rate(self.world // parallel.pp)
        moved = sum(count * (n - 1) / n for count, n in zip((held.dense, held.experts), copies, strict=True)) * (
            4 + size
        )
        owned = float(held.dense + held.experts)
        if self.cfg.optim.distributed:
            owned = held.dense / copies[0] + held.experts / copies[1]
        touched = 2 * 12 * owned + 2 * 4 * (
            held.dense + held.experts
        )  # moments and weights, read and written; norm and clip
        return Parts(gradients=moved / rate, optimizer=touched / (self.hardware.bandwidth * self.assumed.bandwidth))


def backward(forward: Parts) -> Parts:
    return Parts(*map(mul, vars(forward).values(), vars(BACKWARD).values()))
