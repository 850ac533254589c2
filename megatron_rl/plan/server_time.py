"""Seconds of a step's sampling on SGLang servers, and what their memory holds.

A decode step reads the weights that its batch uses (the experts of every token) and the KV cache of
every running request; it takes the longer of these bytes and its FLOPs.  Slots are full until
nothing waits; then they drain as responses end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import Config
from megatron_rl.config.rules.server_gpus import tensor_ranks
from megatron_rl.models.cost import active_parameters, attention_width, cache_numbers
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import Assumptions, Hardware, Rates
from megatron_rl.plan.lengths import Lengths, lengths_of

SERVED = 2  # bytes of a served weight and of a cached number: 16 bits
GRID = 200  # points of the integral over a draining batch


@dataclass(frozen=True)
class ServerPlan:
    """num servers of `devices` each; max_running, max_tokens: limits of their command line, None:
    only memory limits.
    """

    num: int
    devices: int
    max_running: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class SamplingTime:
    """Seconds of one step's sampling.

    slots: concurrent requests of a server; cached: tokens that its KV cache holds.
    """

    prefill: float
    full: float
    """With every slot busy."""
    tail: float
    """From an empty queue to the last response."""
    slots: float
    cached: float

    @property
    def total(self) -> float:
        return self.prefill + self.full + self.tail


@dataclass(frozen=True)
class DecodeModel:
    """Servers of one model."""

    spec: ModelSpec
    server_pool: ServerPlan
    hardware: Hardware
    assumed: Assumptions

    @cached_property
    def rates(self) -> Rates:
        return Rates(self.hardware, self.assumed)

    def sample(self, cfg: Config) -> SamplingTime:
        """All responses of a step.

        Raises ValueError if the weights leave no room for one request.
        """
        lengths, prompt = (
            lengths_of(cfg, self.assumed),
            self.assumed.mean_prompt * cfg.data.max_prompt_tokens,
        )
        responses = cfg.run.prompts_per_step * cfg.run.group_size
        share = responses / self.server_pool.num
        cached = self.cached_tokens()
        age = lengths.second_moment / (2 * lengths.mean)  # mean age of a running response
        limit = self.server_pool.max_running or float("inf")
        slots = min(share, limit, cached / (prompt + age))
        if slots < 1:
            raise ValueError(
                f"servers of {self.server_pool.devices} x {self.hardware.name} have room for"
                f" {max(0.0, cached):,.0f} tokens beside the weights, one request needs"
                f" {prompt + age:,.0f}; give a server more GPUs"
            )
        # tokens of the responses beyond the last `slots`, which drain
        steps = max(0.0, share - slots) * lengths.mean / slots
        # once per prompt: its group shares the prefix
        prefill = (
            cfg.run.prompts_per_step
            / self.server_pool.num
            * prompt
            * 2
            * active_parameters(self.spec)
        )
        return SamplingTime(
            prefill=prefill / (self.server_pool.devices * self.rates.matrices),
            full=steps * self.decode_step(slots, prompt + age),
            tail=sum(self._drain(slots, prompt, lengths, responses)),
            slots=slots,
            cached=cached,
        )

    def _drain(
        self, slots: float, prompt: float, lengths: Lengths, responses: int
    ) -> Iterator[float]:
        """Seconds of each piece of the drain.  It ends with the last response of all servers: at
        age t some response is running with probability 1 - (1 - S(t))^n."""
        piece = lengths.cap / GRID
        for index in range(GRID):
            age = (index + 0.5) * piece
            alive = lengths.survival(age)
            is_any_left = 1 - (1 - alive) ** responses
            # 1.0: the last one
            yield piece * is_any_left * self.decode_step(max(1.0, slots * alive), prompt + age)

    def decode_step(self, batch: float, context: float) -> float:
        """Seconds in which `batch` requests with `context` tokens each get one more token."""
        spec, assumed, rates, devices = (
            self.spec,
            self.assumed,
            self.rates,
            self.server_pool.devices,
        )
        product_flops = 2 * active_parameters(spec) * batch
        products = (
            max(self._weights_read(batch) / rates.memory, product_flops / rates.matrices) / devices
        )
        attention_flops = 2 * batch * context * spec.num_layers * latent_width(spec)
        cache_read = batch * context * self.cache_bytes()
        attention = max(cache_read / rates.memory, attention_flops / devices / rates.attention)
        # two ring all-reduces per layer, each of which moves the rows twice
        reduced = (
            2
            * 2
            * (devices - 1)
            / devices
            * batch
            * spec.hidden_size
            * SERVED
            / rates.link(devices)
        )
        waits = (
            2 * assumed.collective_seconds * -(-devices // rates.per_node) if devices > 1 else 0.0
        )
        return (
            products
            + attention
            + spec.num_layers * (reduced + waits + assumed.decode_layer_seconds)
        )

    def _weights_read(self, batch: float) -> float:
        """Bytes: all dense weights, and the experts that at least one of the batch's tokens chose."""
        model = memory.full_model(self.spec)
        chosen = (
            1 - (1 - self.spec.top_k / self.spec.num_experts) ** batch
            if self.spec.num_experts
            else 0.0
        )
        return SERVED * (model.dense + model.experts * chosen)

    def weight_bytes(self) -> float:
        """On each device of a server."""
        return SERVED * memory.full_model(self.spec).total / self.server_pool.devices

    def cache_bytes(self) -> float:
        """Of one token on each device: KV heads are sharded, MLA's latent is on every device."""
        shards = 1 if self.spec.is_mla else min(self.server_pool.devices, self.spec.num_kv_heads)
        return SERVED * cache_numbers(self.spec) / shards

    def cached_tokens(self) -> float:
        """Tokens that fit into a server's KV cache; below 0 if not even its weights fit."""
        room = self.hardware.memory * self.assumed.server_memory - self.weight_bytes()
        fits = room / self.cache_bytes()
        return min(fits, self.server_pool.max_tokens) if self.server_pool.max_tokens else fits


def latent_width(spec: ModelSpec) -> int:
    """Numbers that a query is multiplied with per cached token: under MLA every head works on the
    latent itself.
    """
    return (
        spec.num_heads * (2 * spec.kv_lora_rank + spec.qk_rope_dim)
        if spec.is_mla
        else attention_width(spec)
    )


def configured_servers(
    spec: ModelSpec, cfg: Config, hardware: Hardware, assumed: Assumptions
) -> ServerPlan:
    """The servers that a configuration starts, or attaches to: those are assumed to have the
    smallest size that fits.
    """
    rollout = cfg.rollout
    if rollout.urls:
        return ServerPlan(len(rollout.urls), least_devices(spec, hardware, assumed))
    devices = tensor_ranks(rollout.server_args) or max(1, len(rollout.gpus) // rollout.num_servers)
    return ServerPlan(
        rollout.num_servers, devices, rollout.max_running_requests, rollout.max_total_tokens
    )


def propose_servers(
    spec: ModelSpec, devices: int, hardware: Hardware, assumed: Assumptions
) -> ServerPlan:
    """As many servers of the least size as `devices` allow.

    Raises ValueError if they are too few for one.
    """
    size = least_devices(spec, hardware, assumed)
    if size > devices:
        raise ValueError(
            f"{devices} x {hardware.name} cannot serve this model in 16 bits with room for a KV"
            f" cache: a server takes {size}; give --server-gpus {size} or more"
        )
    return ServerPlan(devices // size, size)


def least_devices(spec: ModelSpec, hardware: Hardware, assumed: Assumptions) -> int:
    """The smallest power of two whose memory is at most half filled by weights: the rest is for the
    KV cache.
    """
    room = hardware.memory * assumed.server_memory / 2
    return 1 << max(0, math.ceil(math.log2(SERVED * memory.full_model(spec).total / room)))
