"""The servers of a run, started or found, and what samples from them and sends weights to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.config.device_limits import Device
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.config.rules.server_gpus import devices_of_server
from megatron_rl.config.rules.server_rules import is_reachable
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.config.sglang_settings import Values
from megatron_rl.distributed import Parallel, from_rank_0
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.console import Console
from megatron_rl.models.fit import length_problems, queue_problems
from megatron_rl.models.spec import ModelSpec
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents.runner import make_runner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.client.teachers import Teachers
from megatron_rl.rollout.inference import Inference, Pusher
from megatron_rl.rollout.server.adapter_slots import check_slots, max_age, slot_options
from megatron_rl.rollout.server.sampling_defaults import check_sampling
from megatron_rl.rollout.server.server_info import (
    accepted_lines,
    auth_headers,
    check_identical,
    check_in_place,
    check_server,
    check_settings,
    longest_input,
    served_dtype,
    server_info,
    tokenizer_digest,
)
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.rollout.time_shared_teachers import TimeSharedTeachers
from megatron_rl.trainer.live_rollouts import Leader
from megatron_rl.trainer.services import RunServices
from megatron_rl.weights.hf.adapter_export import export_adapters, slot_weights
from megatron_rl.weights.hf.export import HFStream
from megatron_rl.weights.sync.adapter_push import AdapterPusher
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights, adapted_tensors
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from megatron_rl.weights.version import new_run_name


def make_inference(
    cfg: Config,
    services: RunServices,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    time_shared_teachers: TimeSharedTeachers | None = None,
) -> tuple[Inference, Leader | None]:
    """Start or find the servers, check them, and make the client of this rank.  Collective.

    With rollout.release_memory the trainer leaves the GPUs to the servers while they start, then
    takes them back.
    """
    parallel, console = engine.parallel, services.console
    check_room(cfg, engine.spec, parallel)
    export = make_export(cfg, engine)
    starts_servers = parallel.rank == 0 and not cfg.rollout.urls
    server_pool = make_server_pool(cfg, parallel, console) if starts_servers else None
    memory = engine.offload if cfg.rollout.release_memory else None
    if memory is not None:
        leave_gpus(engine)
    servers = from_rank_0(
        lambda: find_servers(cfg, engine.spec, device_type(parallel), server_pool, stack, console),
        parallel.host_group,
    )
    leader = None
    if parallel.is_replica_leader:
        leader = make_leader(cfg, parallel, engine.spec, tokenizer, servers, stack, services)
    inference = Inference(
        export,
        client=None if leader is None else leader.client,
        pusher=make_pusher(cfg, parallel, servers, server_pool, stack),
        server_pool=server_pool,
        urls=servers.urls,
        log=console.log,
        dtype=servers.dtype,
        group=parallel.host_group,
        memory=memory,
        time_shared_teachers=time_shared_teachers,
    )
    # runs before the pusher closes and the servers end: callbacks run in reverse order
    stack.callback(inference.stop)
    inference.give_memory_to_trainer()
    return inference, leader


def leave_gpus(engine: Engine) -> None:
    """Free the trainer's memory, before servers start on the same GPUs.  Collective."""
    engine.offload.free_training()
    engine.offload.free_weights()
    # on all ranks before any server allocates
    dist.barrier(engine.parallel.host_group)


def check_room(cfg: Config, spec: ModelSpec, parallel: Parallel) -> None:
    """Raise ValueError where responses are longer than the model allows, or where groups that are
    sampled ahead need more host memory than the smallest machine has.  Collective.
    """
    problems = list(length_problems(cfg, spec))
    if cfg.rollout.steps_ahead:
        share_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / dist.get_world_size()
        smallest = torch.tensor(psutil.virtual_memory().total)
        # the smallest of all machines: otherwise only some ranks would stop
        dist.all_reduce(smallest, dist.ReduceOp.MIN, parallel.host_group)
        problems += queue_problems(cfg, spec, share_here, int(smallest))
    if problems:
        raise ValueError("\n".join(problems))


def make_server_pool(cfg: Config, parallel: Parallel, console: Console) -> ServerPool:
    """Return the servers that rank 0 starts and owns."""
    device = device_type(parallel)
    changes = {
        "start_timeout_seconds": cfg.start_seconds(device),
        "server_args": (*slot_options(cfg, device), *cfg.rollout.server_args),
    }
    return ServerPool(
        cfg.model.path,
        cfg.rollout.model_copy(update=changes),
        device=device,
        log_dir=RunFolder(cfg.run_dir).logs,
        seed=cfg.run.seed,
        want_routes=cfg.needs_routes,
        log=console.log,
    )


def device_type(parallel: Parallel) -> Device:
    return "cuda" if parallel.device.type == "cuda" else "cpu"


class FoundServers(NamedTuple):
    """The servers that passed their checks."""

    urls: tuple[str, ...]
    dtype: str
    """Precision that all of them compute in, in which weights are sent."""
    settings: Mapping[str, Values]
    """URL -> the settings that check_settings has checked."""
    run: str
    """The run's name for the weights that it sends, the same on every rank (weights/version.py)."""
    longest_input: int | None = None
    """Number of tokens that every server takes as input, None where none tells."""


def find_servers(
    cfg: Config,
    spec: ModelSpec,
    device: Device,
    server_pool: ServerPool | None,
    stack: ExitStack,
    console: Console,
) -> FoundServers:
    """Return the servers, each of which must serve this model; on rank 0.

    The URLs are those of the configuration, or of `server_pool`, which is started here.
    """
    if server_pool is not None:
        console.log(
            f"starting {cfg.rollout.num_servers} SGLang server(s), log in {server_pool.log_path(0)}"
        )
        stack.enter_context(server_pool)
    urls = cfg.rollout.urls if server_pool is None else server_pool.take()
    headers, timeout = auth_headers(cfg.rollout), cfg.rollout.probe_seconds(device)
    # an earlier run may have left servers paused that it did not start
    infos = [server_info(url, headers, timeout=timeout, resume=server_pool is None) for url in urls]
    dtype = None if cfg.rollout.dtype == "auto" else cfg.rollout.dtype
    for info in infos:
        check_server(
            info,
            spec,
            want_routes=cfg.needs_routes,
            dtype=dtype,
            tokenizer=tokenizer_digest(cfg.model.path),
        )
        check_settings(info, cfg.rollout, want_routes=cfg.needs_routes)
        check_in_place(info, cfg.rollout)
        check_slots(info, cfg)
        check_sampling(info.url, cfg.rollout, vocab_size=spec.vocab_size, device=device)
        console.log(
            f"server {info.url}: SGLang {info.version}, {info.dtype}, experts"
            f" {'yes' if info.routed_experts else 'no'}"
        )
    check_identical(infos)
    for line in accepted_lines(infos, cfg.rollout, want_routes=cfg.needs_routes):
        console.log(line)
    served = served_dtype(infos[0].dtype, cfg.model.path)
    # refuse a limit without effect now, before the first weight sync
    parity_limits(cfg, served)
    return FoundServers(
        tuple(urls),
        served,
        {info.url: info.settings for info in infos},
        new_run_name(),
        longest_input(infos),
    )


def make_leader(
    cfg: Config,
    parallel: Parallel,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    servers: FoundServers,
    stack: ExitStack,
    services: RunServices,
) -> Leader:
    """Return what only the leader of a data-parallel replica has: client, reward pool, recorder.

    Client and reward pool record into the run's trace.
    """
    rules = SampleRules(
        spec,
        cfg.needs_routes,
        drop_missing_routes=cfg.replay.on_missing_route == "drop_sample",
        by_adapter=cfg.rollout.weight_sync == "adapter",
    )
    client = RolloutClient(
        servers.urls,
        cfg.rollout,
        rules,
        episodes=make_runner(cfg, tokenizer, spec.vocab_size, servers.longest_input),
        run=servers.run,
        teachers=make_teachers(cfg, spec),
    )
    rewards = stack.enter_context(RewardPool(cfg.reward, hidden_env=cfg.key_variables))
    client.trace = rewards.trace = services.trace
    return Leader(client, rewards, services.recording.recorder(cfg, parallel))


def make_teachers(cfg: Config, spec: ModelSpec) -> Teachers | None:
    """Return the clients of the teachers; None without any."""
    teachers = cfg.teachers.with_servers
    top_k = cfg.loss.teacher_top_k
    return Teachers(teachers, cfg.rollout, spec.vocab_size, top_k) if teachers else None


def make_export(cfg: Config, engine: Engine) -> Callable[[], HFStream]:
    """Return what yields the tensors of a weight sync.

    Raises ConfigError for adapters that servers have no slots for.
    """
    if cfg.rollout.weight_sync != "adapter":
        return partial(engine.export_parts, max_sources(cfg, engine.parallel))
    slot_weights(engine.spec, cfg.lora)
    return partial(export_adapters, engine.chunks, engine.spec, engine.parallel, cfg.lora)


def make_pusher(
    cfg: Config,
    parallel: Parallel,
    servers: FoundServers,
    server_pool: ServerPool | None,
    stack: ExitStack,
) -> Pusher:
    """Return what sends new weights to the servers, on every rank.

    Raises ValueError for ranks that cannot reach them.
    """
    is_spread = local_world_size(parallel) < parallel.world_size
    if cfg.rollout.weight_sync == "colocated" and is_spread and max_sources(cfg, parallel) > 1:
        raise ValueError(
            f"rollout.weight_sync = colocated with {parallel.world_size} training ranks,"
            f" {local_world_size(parallel)} of them on this machine: without GPUs each sends its"
            " part through the memory of the servers' machine; set rollout.weight_sync ="
            " distributed or disk"
        )
    rollout = cfg.rollout
    places = None
    if parallel.device.type == "cuda" and server_pool is not None:
        places = gpus_of(cfg, server_pool)
    access = ServerAccess(
        servers.urls,
        rollout.weight_sync_timeout_seconds,
        headers=auth_headers(rollout),
        settings=servers.settings,
    )
    weights = PushedWeights(
        cfg.model.path,
        getattr(torch, servers.dtype),
        fp8_keep=rollout.quantize_keep if rollout.quantize == "fp8" else None,
        changing=adapted_tensors(cfg.model.path, cfg.lora.targets) if cfg.lora.rank else None,
    )
    verifies = rollout.verify_push == "checksum"
    pusher: Pusher
    if rollout.weight_sync == "adapter":
        pusher = AdapterPusher(
            access, weights, cfg.lora,
            device=parallel.device, max_age=max_age(cfg), verifies=verifies,
            ranks=Ranks.of(parallel), run=servers.run,
        )  # fmt: skip
    else:
        sending = TransportSettings(
            rollout.weight_sync,
            bucket_mb=rollout.weight_sync_bucket_mb,
            device=parallel.device,
            disk_dir=RunFolder(cfg.run_dir).weights,
            places=places,
        )
        pusher = WeightPusher(
            access, weights, sending,
            verify_every=rollout.verify_push_every if verifies else 0,
            ranks=Ranks.of(parallel), run=servers.run,
        )  # fmt: skip
    stack.callback(pusher.close)
    return pusher


def max_sources(cfg: Config, parallel: Parallel) -> int:
    """Return the largest number of ranks that send weights.

    `disk`, and `colocated` in shared memory, have no limit.  With `distributed` each sender costs
    the servers a process group (rollout.weight_sync_sources); rank 0 sends alone where ranks on
    other machines cannot reach the servers, which listen on rank 0's machine only.  With
    `colocated` on GPUs rank 0 sends alone: every sender takes a bucket, and a CUDA context, on each
    GPU of the servers.
    """
    if cfg.rollout.weight_sync == "distributed":
        is_spread = local_world_size(parallel) < parallel.world_size
        is_unreachable = not cfg.rollout.urls and not is_reachable(cfg.rollout.host)
        return 1 if is_spread and is_unreachable else cfg.rollout.weight_sync_sources
    is_on_gpus = cfg.rollout.weight_sync == "colocated" and parallel.device.type == "cuda"
    return 1 if is_on_gpus else parallel.world_size


def local_world_size(parallel: Parallel) -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world_size))


def gpus_of(cfg: Config, server_pool: ServerPool) -> Callable[[str], Sequence[torch.device]]:
    """Return a function: URL of a server of ours -> the GPU of each of its ranks, as rank 0 numbers
    them.
    """

    def places(url: str) -> list[torch.device]:
        return [
            torch.device("cuda", gpu)
            for gpu in devices_of_server(cfg.rollout, server_pool.index(url), os.environ)
        ]

    return places
