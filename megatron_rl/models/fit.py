"""Checks of parallel sizes against ranks, model and step.

Every error names key, value, rule and fix.  plan/refusals.py calls all of these checks for the
planner, the dry run and the start of a run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from packaging.version import Version

from megatron_rl.config import Config, ModelConfig, ParallelConfig
from megatron_rl.config.versions import least
from megatron_rl.models.spec import ModelError, ModelSpec


def check_sizes(cfg: ParallelConfig, world_size: int) -> None:
    """Raise ValueError for sizes that cannot tile `world_size` ranks or that megatron-core computes
    wrongly.
    """
    # ep is no factor of this product: experts are sharded over the data-parallel ranks
    dense = cfg.tp * cfg.pp * cfg.cp
    if world_size % dense:
        raise ValueError(
            f"parallel.tp x pp x cp = {cfg.tp} x {cfg.pp} x {cfg.cp} = {dense} must divide the"
            f" number of ranks, {world_size}; start a multiple of {dense} ranks or lower one of"
            " them"
        )
    expert = cfg.expert_tp * cfg.ep * cfg.pp
    if world_size % expert:
        etp = ""
        if cfg.etp is None:
            etp = " (the default is tp; set parallel.etp = 1 to keep each expert on one rank)"
        raise ValueError(
            f"parallel.etp x ep x pp = {cfg.expert_tp} x {cfg.ep} x {cfg.pp} = {expert} must divide"
            f" the number of ranks, {world_size}{etp}; start a multiple of {expert} ranks or lower"
            " one of them"
        )
    if cfg.ep == 1 and cfg.expert_tp != cfg.tp and core_version() < Version("0.17"):
        raise ValueError(
            f"parallel.tp = {cfg.tp} with ep = 1 and etp = {cfg.expert_tp}: megatron-core"
            f" {core_version()} then reduces expert gradients over the wrong ranks (replicas left"
            " unreduced, or shards added up), without an error; set ep > 1 or etp = tp"
        )


def check_step(cfg: Config, dp_size: int) -> None:
    """Raise ValueError unless prompt groups divide evenly into every replica's mini-batches."""
    multiple, prompts = dp_size * cfg.run.num_mini_batches, cfg.run.prompts_per_step
    if prompts % multiple:
        raise ValueError(
            f"run.prompts_per_step = {prompts} must be a multiple of {multiple} = data-parallel"
            f" size {dp_size} x run.num_mini_batches {cfg.run.num_mini_batches}; set it to"
            f" {-(-prompts // multiple) * multiple}, or change the number of ranks"
        )
    responses = cfg.run.prompts_per_step // multiple * cfg.run.group_size
    if cfg.parallel.vp > 1 and responses % cfg.parallel.pp:
        raise ValueError(
            f"run.prompts_per_step x group_size gives a replica {responses} responses per"
            f" mini-batch, which must be a multiple of parallel.pp = {cfg.parallel.pp}: with"
            " parallel.vp > 1 micro-batches come in multiples of pp, none empty; change"
            " run.group_size or run.prompts_per_step"
        )


def check_fit(spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ModelError for settings of [parallel] and [model] that do not fit this model."""
    check_attention(spec, parallel)
    check_experts(spec, parallel)
    check_stages(spec, model, parallel)


def tp_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes of parallel.tp that the model allows, with parallel.etp = 1."""
    sizes = []
    for size in range(1, spec.num_kv_heads + 1):
        parallel = ParallelConfig(tp=size, etp=1)
        with suppress(ModelError):
            check_attention(spec, parallel)
            check_experts(spec, parallel)
            sizes.append(size)
    return sizes


def check_divides(key: str, size: int, what: str, total: int) -> None:
    """Raise ModelError unless parallel.`key` = `size` divides `total`, the model's `what`."""
    if total % size:
        raise ModelError(
            f"parallel.{key} = {size} must divide the model's {what}, {total}; use one of"
            f" {divisors(total)}"
        )


def check_attention(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raise ModelError for tensor or context parallelism that this attention does not allow."""
    check_divides("tp", parallel.tp, "num_attention_heads", spec.num_heads)
    check_divides("tp", parallel.tp, "num_key_value_heads", spec.num_kv_heads)
    if spec.qk_norm == "vector" and parallel.tp > 1:
        raise ModelError(
            f"parallel.tp = {parallel.tp}: {spec.architecture} normalises queries over all heads,"
            " but a tensor rank has only some; set it to 1 (and use ep)"
        )
    if spec.is_mla and parallel.cp > 1:
        raise ModelError(
            f"parallel.cp = {parallel.cp}: latent attention under context parallelism is not"
            " supported; set it to 1"
        )
    if (spec.is_mla or spec.moe_layers) and parallel.tp > 1 and not parallel.use_sequence_parallel:
        raise ModelError(
            f"parallel.sequence_parallel = false with parallel.tp = {parallel.tp}: megatron-core's"
            " MoE needs it, and without it core counts the gradient of latent attention's query"
            " norm tp times; remove the key"
        )


def check_experts(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raise ModelError for experts or MLPs that cannot be trained, or not in these shards."""
    if (
        spec.moe_layers
        and spec.top_k == 1
        and spec.router.score_function == "softmax"
        and not spec.router.pre_softmax
    ):
        raise ModelError(
            f"num_experts_per_tok = 1 with norm_topk_prob = true in {spec.architecture}: every gate"
            " weight is 1, the router gets no gradient, and megatron-core refuses it; use a"
            " checkpoint with norm_topk_prob = false"
        )
    if spec.moe_layers:
        check_divides("ep", parallel.ep, "number of experts", spec.num_experts)
        check_divides("etp", parallel.expert_tp, "moe_intermediate_size", spec.expert_ffn_size)
        check_divides("tp", parallel.tp, "size of shared experts", spec.shared_ffn_size)
    elif parallel.ep > 1:
        raise ModelError(
            f"parallel.ep = {parallel.ep}: {spec.architecture} has no experts; set it to 1"
        )
    if len(spec.moe_layers) < spec.num_layers:
        check_divides("tp", parallel.tp, "intermediate_size", spec.ffn_size)


def check_stages(spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ModelError for pipeline stages that do not divide the layers, and for settings of
    [model] that these stages exclude.
    """
    if not parallel.layers_per_stage:
        what = "num_hidden_layers (or set layers_per_stage)"
        check_divides("pp x vp", parallel.pp * parallel.vp, what, spec.num_layers)
    elif sum(parallel.layers_per_stage) != spec.num_layers:
        raise ModelError(
            f"parallel.layers_per_stage = {list(parallel.layers_per_stage)} adds up to"
            f" {sum(parallel.layers_per_stage)}, the model's num_hidden_layers is"
            f" {spec.num_layers}; every layer belongs to one stage: change a count"
        )
    stages = parallel.layers_per_stage or (spec.num_layers // (parallel.pp * parallel.vp),)
    if model.recompute == "full" and any(count % model.recompute_layers for count in stages):
        raise ModelError(
            f"model.recompute_layers = {model.recompute_layers} must divide the layers of every"
            f" pipeline stage, {list(stages)}; use one of {divisors(math.gcd(*stages))}"
        )
    if model.token_dispatcher == "allgather" and parallel.pp > 1:
        raise ModelError(
            f"model.token_dispatcher = allgather with parallel.pp = {parallel.pp}: megatron-core"
            " refuses it for sequences of different lengths; use alltoall"
        )


SERVER_TOKENS = 6
"""Tokens of its KV cache and of the model's positions that SGLang leaves unused (tp_worker.py:
max_req_input_len)."""


def length_problems(cfg: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield why servers that the run starts could not finish a response of full length to the
    longest prompt.

    SGLang refuses requests beyond the model's positions, unless it is started with a longer
    context, and truncates responses that do not fit into its KV cache.
    """
    rollout, prompt = cfg.rollout, cfg.data.max_prompt_tokens
    if rollout.urls:
        return
    limits = [
        (
            rollout.max_total_tokens, "rollout.max_total_tokens", "the KV cache of a server",
            "SGLang truncates longer responses silently; lower one of the first two or raise"
            " rollout.max_total_tokens",
        )
    ]  # fmt: skip
    # --context-length, perhaps abbreviated
    if not any(arg.startswith("--context") for arg in rollout.server_args):
        refused = "the server refuses longer requests; lower one of them"
        name = "the model's max_position_embeddings"
        limits.append((spec.max_positions, name, "its context", refused))
    for section, response in (
        ("rollout", rollout.max_response_tokens),
        ("eval", cfg.eval.max_response_tokens or 0),
    ):
        for most, name, what, reason in limits:
            if prompt + response > most - SERVER_TOKENS:
                yield (
                    f"data.max_prompt_tokens = {prompt} and {section}.max_response_tokens ="
                    f" {response}: {prompt + response} tokens must be at most"
                    f" {most - SERVER_TOKENS}, {name} = {most} ({what}) less {SERVER_TOKENS} that"
                    f" SGLang leaves unused: {reason}"
                )


TOKEN_BYTES = 16
"""Bytes of a token (8), its log-prob (4) and its weight version (4) in a rollout."""


def queue_prompts(cfg: Config) -> float:
    """Return how many prompts are in progress or complete before a step takes its groups, over all
    replicas.
    """
    return cfg.run.prompts_per_step * (1 + cfg.rollout.steps_ahead + cfg.rollout.over_sample)


def queue_bytes(cfg: Config, spec: ModelSpec) -> float:
    """Return the bytes of these prompts' groups on the hosts of all leaders, where every response
    reaches its limit.
    """
    per_token = TOKEN_BYTES
    if cfg.needs_routes:
        per_token += len(spec.moe_layers) * spec.top_k * (1 if spec.num_experts <= 256 else 2)
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    return queue_prompts(cfg) * cfg.run.group_size * longest * per_token


def queue_problems(cfg: Config, spec: ModelSpec, replicas: float, memory: int) -> Iterator[str]:
    """Yield why the groups that are sampled ahead might not fit into a machine's host memory.

    replicas: fraction of the data-parallel replicas whose leaders are on this machine.
    memory: bytes of its host memory.
    """
    ahead, size = cfg.rollout.steps_ahead, queue_bytes(cfg, spec) * replicas
    if ahead and size > memory:
        yield (
            f"rollout.max_staleness = {cfg.rollout.max_staleness} keeps up to {1 + ahead} steps of"
            f" rollouts in memory on this machine: {size / 2**30:.1f} GiB where all responses reach"
            f" rollout.max_response_tokens = {cfg.rollout.max_response_tokens}, must be at most its"
            f" {memory / 2**30:.1f} GiB; lower rollout.max_staleness"
        )


def divisors(total: int) -> str:
    """Return the divisors of `total` up to 64, as text."""
    return ", ".join(str(size) for size in range(1, min(total, 64) + 1) if total % size == 0)


@functools.cache  # it parses the package's metadata
def core_version() -> Version:
    """Return the installed version of megatron-core.

    Planning needs none: without one it is the lowest supported, which has the strictest rules.
    """
    try:
        return Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        return least("megatron-core")
