"""Build a Trainer: cheap checks first, then the model, then the rollout source.  On exit everything closes in reverse order."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.checkpointer import Checkpointer
from megatron_rl.checkpoint.lock import locked
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import Config, dump_config
from megatron_rl.config.device_limits import Device
from megatron_rl.config.parity_limits import parity_limits
from megatron_rl.config.server_gpus import devices_of_server
from megatron_rl.config.server_rules import check_can_release
from megatron_rl.config.server_settings import Values
from megatron_rl.data.prompts import PromptSource, load_prompt_files, load_tokenizer
from megatron_rl.distributed import Parallel, disable_tf32, from_rank_0, make_parallel
from megatron_rl.engine.core_fields import untested
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.provider import read_spec
from megatron_rl.launch import nccl
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.launch.watchdog import LOADING, Watchdog
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.models.fit import length_problems
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout
from megatron_rl.replay.compatibility import compatibility_line
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents.runner import check_agent, make_runner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.recorder import Recorder
from megatron_rl.rollout.server.sampling_defaults import check_sampling
from megatron_rl.rollout.server.server_info import (
    accepted_lines,
    auth_headers,
    check_identical,
    check_server,
    check_settings,
    server_info,
    tokenizer_digest,
)
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.trainer.batch_saver import BatchSaver
from megatron_rl.trainer.reporter import Reporter
from megatron_rl.trainer.rollout_source import Leader, LiveRollouts, RolloutSource, SavedRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.weights.sync.push import WeightPusher


@contextmanager
def start_trainer(cfg: Config, rollouts: Path | None = None) -> Iterator[Trainer]:
    """A run that is ready for its first step: data read, model loaded, servers started, weights sent, parity checked.

    rollouts: a run directory whose saved rollouts are trained on, without servers, parity check and evaluation.
    Raises ValueError for bad input (before any server or model), RuntimeError for a server that fails its checks.
    """
    quiet_libraries()
    with ExitStack() as stack:
        tokenizer = load_tokenizer(cfg.model.path)
        if cfg.agent.name and rollouts is None:
            check_agent(cfg.agent, tokenizer)
        sets = {name: (path, cfg.eval_data) for name, path in cfg.eval.sets.items()} if rollouts is None else {}
        files = load_prompt_files({"": (cfg.data.train, cfg.data)} | sets, tokenizer)  # "": no set may have this name
        prompts = PromptSource(files[""].prompts, seed=cfg.run.seed, shuffle=cfg.data.shuffle)
        if cfg.model.is_exact:
            disable_tf32()
        parallel = make_parallel(
            cfg.parallel, device=cfg.run.device, timeout_minutes=cfg.run.collective_timeout_minutes, seed=cfg.run.seed
        )
        stack.callback(parallel.destroy)
        from_rank_0(lambda: stack.enter_context(locked(cfg.run_dir)))
        watchdog = stack.enter_context(make_watchdog(cfg, parallel))
        check_start(cfg, parallel, has_servers=rollouts is None)
        console = Console(enabled=parallel.rank == 0)
        if parallel.device.type == "cuda":
            for line in nccl.user_settings(os.environ):
                console.log(line)
        for file in files.values():
            console.log(file.line(cfg.data))
        watchdog.enter(LOADING)
        engine = Engine(cfg, parallel, total_updates=cfg.run.num_steps * cfg.run.num_mini_batches)
        console.log(compatibility_line(cfg, engine.core_config))
        if fields := untested(cfg.megatron.fields):
            console.log(f"untested with routing replay: {', '.join(f'megatron.{name}' for name in fields)}")
        meter = StepMeter(watchdog)
        source: RolloutSource
        if rollouts is None:
            watchdog.enter("starting or finding servers")
            inference, leader = make_inference(cfg, parallel, engine, tokenizer, stack, console)
            watchdog.waiting_for = inference.waiting_for
            eval_sets = {name: file.prompts for name, file in files.items() if name}
            source = LiveRollouts(
                cfg, parallel, engine, tokenizer, prompts, eval_sets, inference, leader, meter, console
            )
        else:
            source = SavedRollouts(cfg, parallel, engine.spec, prompts, rollouts, meter, console)
        watchdog.enter(LOADING)
        policy = CheckpointPolicy(
            Checkpointer(engine, cfg.run_dir / "checkpoints", console.log), before_save=source.release_memory
        )
        reporter = Reporter(cfg, console, make_sinks(cfg, stack) if parallel.rank == 0 else None)
        first_step = resume(policy, source, console)
        source.start(first_step)
        gc.collect()
        gc.freeze()  # libraries hold 10^6 objects: every later collection would scan them, for 0.2 s each
        saver = BatchSaver(cfg, engine, console.log)
        yield Trainer(cfg, parallel, engine, source, policy, meter, reporter, saver, first_step)


def check_start(cfg: Config, parallel: Parallel, *, has_servers: bool) -> None:
    """Raise ValueError for a run that cannot start here.  Collective: what concerns the GPUs is checked on rank 0."""
    check_can_release(cfg.rollout.release_memory, parallel.device.type)
    spec, world = read_spec(cfg.model, parallel.device), parallel.world_size
    check_layout(spec, cfg, world)
    check_core(spec, cfg)

    def check() -> None:
        check_gpus(spec, cfg, world, this_machine(parallel), has_servers=has_servers)

    if parallel.device.type == "cuda":
        from_rank_0(check)


def this_machine(parallel: Parallel) -> Machine:
    """Rank 0's host.  Its GPUs are counted by the driver: torch sees those of CUDA_VISIBLE_DEVICES alone."""
    device = torch.cuda.get_device_properties(parallel.device)
    hardware = replace(HARDWARE["h100"], name=device.name, memory=float(device.total_memory))  # its rates are not used
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = len(list(driver.iterdir())) if driver.is_dir() else torch.cuda.device_count()
    return Machine(hardware, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus, os.environ)


def resume(policy: CheckpointPolicy, source: RolloutSource, console: Console) -> int:
    """Continue from a checkpoint, as [checkpoint] says; returns the number of finished steps, 0 without a checkpoint."""
    restored = policy.resume()
    if restored is None:
        return 0
    lines = source.restore(restored.progress, restored.path, restored.accepted)
    for line in [*restored.lines, *lines]:
        console.log(line)
    return restored.step


def make_watchdog(cfg: Config, parallel: Parallel) -> Watchdog:
    """Names the rank that the others wait for.  Its stage limit is shorter than that of collectives, which name no rank."""
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    return Watchdog(
        parallel.store(),
        parallel.rank,
        parallel.world_size,
        stage_seconds=cfg.stage_seconds,
        silence_seconds=cfg.run.silence_timeout_seconds,
        folder=cfg.run_dir,
        agreed=(StoppedBySignal,),
    )


def make_inference(
    cfg: Config,
    parallel: Parallel,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    console: Console,
) -> tuple[Inference, Leader | None]:
    """The servers, started or found, then checked; the clients of this rank.  Collective.

    With rollout.release_memory the trainer leaves the GPUs to the servers while they start, then takes them back.
    """
    if problems := list(length_problems(cfg, engine.spec)):
        raise ValueError("\n".join(problems))
    server_pool = make_server_pool(cfg, parallel, console) if parallel.rank == 0 and not cfg.rollout.urls else None
    memory = engine.offload if cfg.rollout.release_memory else None
    if memory is not None:
        memory.free_training()
        memory.free_weights()
        dist.barrier(parallel.host_group)
    found = from_rank_0(lambda: find_servers(cfg, engine.spec, device_type(parallel), server_pool, stack, console))
    leader = (
        make_leader(cfg, parallel, engine.spec, tokenizer, found.urls, stack) if parallel.is_replica_leader else None
    )
    pusher = make_pusher(cfg, parallel, found, server_pool, stack) if parallel.rank == 0 else None
    client = None if leader is None else leader.client
    inference = Inference(
        engine.export,
        client=client,
        pusher=pusher,
        server_pool=server_pool,
        urls=found.urls,
        log=console.log,
        dtype=found.dtype,
        group=parallel.host_group,
        memory=memory,
    )
    stack.callback(inference.stop)
    inference.release_memory()
    return inference, leader


def make_server_pool(cfg: Config, parallel: Parallel, console: Console) -> ServerPool:
    """The servers that rank 0 starts and owns."""
    device = device_type(parallel)
    return ServerPool(
        cfg.model.path,
        cfg.rollout.model_copy(update={"start_timeout_seconds": cfg.start_seconds(device)}),
        device=device,
        log_dir=cfg.run_dir,
        seed=cfg.run.seed,
        want_routes=cfg.needs_routes,
        log=console.log,
    )


def device_type(parallel: Parallel) -> Device:
    return "cuda" if parallel.device.type == "cuda" else "cpu"


class FoundServers(NamedTuple):
    """dtype: the precision that all of them compute in; settings: URL -> what check_settings has checked."""

    urls: tuple[str, ...]
    dtype: str
    settings: Mapping[str, Values]


def find_servers(
    cfg: Config, spec: ModelSpec, device: Device, server_pool: ServerPool | None, stack: ExitStack, console: Console
) -> FoundServers:
    """The servers that passed their checks, on rank 0.

    The URLs are those of the configuration, or of `server_pool`, which is started here.  Each must serve this model.
    """
    if server_pool is not None:
        console.log(f"starting {cfg.rollout.num_servers} SGLang server(s), log in {server_pool.log_path(0)}")
        stack.enter_context(server_pool)
    urls = cfg.rollout.urls if server_pool is None else server_pool.take()
    headers, timeout = auth_headers(cfg.rollout), cfg.rollout.probe_seconds(device)
    infos = [server_info(url, headers, timeout=timeout) for url in urls]
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
        check_sampling(info.url, cfg.rollout, vocab_size=spec.vocab_size, device=device)
        console.log(
            f"server {info.url}: SGLang {info.version}, {info.dtype}, experts {'yes' if info.routed_experts else 'no'}"
        )
    check_identical(infos)
    for line in accepted_lines(infos, cfg.rollout, want_routes=cfg.needs_routes):
        console.log(line)
    parity_limits(cfg, infos[0].dtype)  # refuses a limit without effect, before the first weight sync
    return FoundServers(tuple(urls), infos[0].dtype, {info.url: info.settings for info in infos})


def make_leader(
    cfg: Config,
    parallel: Parallel,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    urls: Sequence[str],
    stack: ExitStack,
) -> Leader:
    """What only the leader of a data-parallel replica has: client, reward pool, recorder."""
    return Leader(
        client=RolloutClient(
            urls,
            cfg.rollout,
            spec=spec,
            want_routes=cfg.needs_routes,
            drop_missing_routes=cfg.replay.on_missing_route == "drop_sample",
            episodes=make_runner(cfg, tokenizer, spec.vocab_size, spec.max_positions),
        ),
        rewards=stack.enter_context(RewardPool(cfg.reward, hidden_env=cfg.rollout.api_key_env)),
        recorder=Recorder(cfg.run_dir, dp_rank=parallel.dp_rank, save_tensors=cfg.rollout.save_tensors),
    )


def make_pusher(
    cfg: Config, parallel: Parallel, found: FoundServers, server_pool: ServerPool | None, stack: ExitStack
) -> WeightPusher:
    """What sends new weights to the servers, on rank 0."""
    served = cfg.model.dtype if cfg.rollout.dtype == "auto" else cfg.rollout.dtype
    pusher = WeightPusher(
        found.urls,
        checkpoint=cfg.model.path,
        dtype=getattr(torch, served),
        transport=cfg.rollout.weight_sync,
        bucket_mb=cfg.rollout.weight_sync_bucket_mb,
        device=parallel.device,
        timeout_seconds=cfg.rollout.weight_sync_timeout_seconds,
        disk_dir=cfg.run_dir / "weights",
        headers=auth_headers(cfg.rollout),
        settings=found.settings,
        verify_every=cfg.rollout.verify_push_every if cfg.rollout.verify_push == "checksum" else 0,
        places=gpus_of(cfg, server_pool) if parallel.device.type == "cuda" and server_pool is not None else None,
        fp8_keep=cfg.rollout.quantize_keep if cfg.rollout.quantize == "fp8" else None,
    )
    stack.callback(pusher.close)
    return pusher


def gpus_of(cfg: Config, server_pool: ServerPool) -> Callable[[str], Sequence[torch.device]]:
    """URL of a server of ours -> the GPU of each of its ranks, as rank 0 numbers them."""

    def places(url: str) -> list[torch.device]:
        return [torch.device("cuda", gpu) for gpu in devices_of_server(cfg.rollout, server_pool.index(url), os.environ)]

    return places


def make_sinks(cfg: Config, stack: ExitStack) -> Sinks:
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    (cfg.run_dir / "config.toml").write_text(dump_config(cfg))
    return stack.enter_context(Sinks(cfg.run_dir))


def quiet_libraries() -> None:
    """Silence the warnings that libraries print on every start; those of the user's code stay visible."""
    for module in ("megatron", "torch", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\..*")
        logging.getLogger(module).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Please use DTensor")  # core's checkpoints; raised in our name
    logging.getLogger("httpx").setLevel(logging.WARNING)
