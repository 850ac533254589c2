"""Seconds of a step's sampling on SGLang servers, and the contents of their memory.

A decode step reads the weights that its batch uses (the experts of every token) and the KV cache of
every running request; it takes the time of these bytes or of its FLOPs, whichever is longer.  All
slots are busy until no request waits; then they drain as responses end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import Config
from megatron_rl.config.rules.server_gpus import mem_fraction, tensor_ranks
from megatron_rl.models.cost import active_parameters, attention_width, cache_numbers
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import Assumptions, Hardware, Rates
from megatron_rl.plan.lengths import Lengths, lengths_of

SERVED = 2
"""Bytes of a served weight and of a cached number: 16 bits."""
GRID = 200
"""Points of the integral over the drain."""


@dataclass(frozen=True)
class ServerPlan:
    """The servers of a plan."""

    num: int
    """Number of servers."""
    devices: int
    """Devices of every server."""
    max_running: int | None = None
    """Concurrent requests of a server by its command line; None: as many as memory allows."""
    max_tokens: int | None = None
    """Tokens in the KV cache of a server by its command line; None: as many as memory allows."""
    mem_fraction: float | None = None
    """--mem-fraction-static of its command line; None: that of the assumptions."""


@dataclass(frozen=True)
class SamplingTime:
    """Seconds of one step's sampling."""

    prefill: float
    full: float
    """Seconds of decoding with every slot busy."""
    tail: float
    """Seconds from an empty queue to the last response."""
    slots: float
    """Concurrent requests of a server."""
    cached: float
    """Tokens that a server's KV cache holds."""

    @property
    def total(self) -> float:
        return self.prefill + self.full + self.tail


@dataclass(frozen=True)
class DecodeModel:
    """The time and the memory of the servers of one model."""

    spec: ModelSpec
    server_pool: ServerPlan
    hardware: Hardware
    assumed: Assumptions

    @cached_property
    def rates(self) -> Rates:
        return Rates(self.hardware, self.assumed)

    def sample(self, cfg: Config) -> SamplingTime:
        """Return the time in which all responses of a step are sampled.

        Raises ValueError if the weights leave no room for one request.
        """
        lengths = lengths_of(cfg, self.assumed)
        prompt = self.assumed.mean_prompt * cfg.data.max_prompt_tokens
        prompts = cfg.run.prompts_per_step
        responses = prompts * cfg.run.group_size
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
        # tokens of all responses but the last `slots`, which drain
        steps = max(0.0, share - slots) * lengths.mean / slots
        # FLOPs, once per prompt, because its group shares the prefix
        prefill = prompts / self.server_pool.num * prompt * 2 * active_parameters(self.spec)
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
        """Yield the seconds of every piece of the drain.

        It ends with the last response of all servers: at age t one of the n responses is running
        with probability 1 - (1 - S(t))^n.
        """
        piece = lengths.cap / GRID
        for index in range(GRID):
            # the middle of the piece
            age = (index + 0.5) * piece
            alive = lengths.survival(age)
            is_any_left = 1 - (1 - alive) ** responses
            # at least 1.0, the last response
            yield piece * is_any_left * self.decode_step(max(1.0, slots * alive), prompt + age)

    def decode_step(self, batch: float, context: float) -> float:
        """Return the seconds in which `batch` requests, with `context` tokens each, get one more
        token.
        """
        spec, rates, devices = self.spec, self.rates, self.server_pool.devices
        product_flops = 2 * active_parameters(spec) * batch
        weights_read = self._weights_read(batch)
        products = max(weights_read / rates.memory, product_flops / rates.matrices) / devices
        attention_flops = 2 * batch * context * spec.num_layers * latent_width(spec)
        cache_read = batch * context * self.cache_bytes()
        attention = max(cache_read / rates.memory, attention_flops / devices / rates.attention)
        # two ring all-reduces per layer, each of which moves the rows twice
        moves = 2 * 2 * (devices - 1) / devices
        reduced = moves * batch * spec.hidden_size * SERVED / rates.link(devices)
        waits = 0.0
        if devices > 1:
            nodes = -(-devices // rates.per_node)
            waits = 2 * self.assumed.collective_seconds * nodes
        layer_seconds = reduced + waits + self.assumed.decode_layer_seconds
        return products + attention + spec.num_layers * layer_seconds

    def _weights_read(self, batch: float) -> float:
        """Return the bytes of all dense weights, and of the experts that the batch's tokens chose.

        An expert is chosen by one of them with probability 1 - (1 - K / E)^batch.
        """
        model, chosen = memory.full_model(self.spec), 0.0
        if self.spec.num_experts:
            chosen = 1 - (1 - self.spec.top_k / self.spec.num_experts) ** batch
        return SERVED * (model.dense + model.experts * chosen)

    def weight_bytes(self) -> float:
        """Return the bytes of weights on every device of a server."""
        return SERVED * memory.full_model(self.spec).total / self.server_pool.devices

    def cache_bytes(self) -> float:
        """Return the bytes of one token in the KV cache of every device of a server."""
        # KV heads are sharded over devices, MLA's latent is on all of them
        shards = 1 if self.spec.is_mla else min(self.server_pool.devices, self.spec.num_kv_heads)
        return SERVED * cache_numbers(self.spec) / shards

    def cached_tokens(self) -> float:
        """Return how many tokens fit into a server's KV cache; < 0 if its weights do not fit."""
        share = self.server_pool.mem_fraction or self.assumed.server_memory
        fits = (self.hardware.memory * share - self.weight_bytes()) / self.cache_bytes()
        return min(fits, self.server_pool.max_tokens) if self.server_pool.max_tokens else fits

    def static_bytes(self) -> float:
        """Return the bytes of weights and KV cache on every device of a server."""
        return self.weight_bytes() + max(0.0, self.cached_tokens()) * self.cache_bytes()


def score_seconds(
    cfg: Config, teacher: ModelSpec, devices: int, hardware: Hardware, assumed: Assumptions
) -> float:
    """Return the seconds in which a teacher's server of `devices` scores a step's responses.

    It is the time of the FLOPs of its products, once per prompt, because a group shares it, and
    once per sampled token; attention is left out.
    """
    prompts = cfg.run.prompts_per_step
    sampled = prompts * cfg.run.group_size * lengths_of(cfg, assumed).mean
    tokens = prompts * assumed.mean_prompt * cfg.data.max_prompt_tokens + sampled
    return 2 * active_parameters(teacher) * tokens / (devices * Rates(hardware, assumed).matrices)


def latent_width(spec: ModelSpec) -> int:
    """Return how many numbers a query is multiplied with per cached token."""
    if spec.is_mla:  # every head works on the latent itself
        return spec.num_heads * (2 * spec.kv_lora_rank + spec.qk_rope_dim)
    return attention_width(spec)


def configured_servers(
    spec: ModelSpec, cfg: Config, hardware: Hardware, assumed: Assumptions
) -> ServerPlan:
    """Return the servers that a configuration starts or attaches to.

    Attached servers are assumed to have the smallest size that fits.
    """
    rollout = cfg.rollout
    if rollout.urls:
        return ServerPlan(len(rollout.urls), least_devices(spec, hardware, assumed))
    devices = tensor_ranks(rollout.server_args) or max(1, len(rollout.gpus) // rollout.num_servers)
    return ServerPlan(
        rollout.num_servers,
        devices,
        rollout.max_running_requests,
        rollout.max_total_tokens,
        mem_fraction(rollout.server_args),
    )


def propose_servers(
    spec: ModelSpec, devices: int, hardware: Hardware, assumed: Assumptions, option: str
) -> ServerPlan:
    """Return as many servers of the smallest size as `devices` allow.

    Raises ValueError, which names the `option` that gives more of them, if they are too few for
    one server.
    """
    size = least_devices(spec, hardware, assumed)
    if size > devices:
        raise ValueError(
            f"{devices} x {hardware.name} cannot serve this model in 16 bits with room for a KV"
            f" cache: a server takes {size}; give {option} {size} or more, or a smaller model"
        )
    return ServerPlan(devices // size, size)


def least_devices(spec: ModelSpec, hardware: Hardware, assumed: Assumptions) -> int:
    """Return the smallest power of two of devices whose memory weights fill to at most a half.

    The other half is for the KV cache.
    """
    room = hardware.memory * assumed.server_memory / 2
    # at least 1 device
    return 1 << max(0, math.ceil(math.log2(SERVED * memory.full_model(spec).total / room)))
