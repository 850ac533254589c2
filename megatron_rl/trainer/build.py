"""Build a Trainer: cheap checks first, then the model, then the rollout source.

On exit everything closes in reverse order.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.checkpointer import Checkpointer
from megatron_rl.checkpoint.lock import locked
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import Config
from megatron_rl.config.rules.server_rules import check_can_release
from megatron_rl.data.prompts import PromptSource, load_prompt_files, load_tokenizer, trained_on
from megatron_rl.distributed import Parallel, disable_tf32, from_rank_0, make_parallel
from megatron_rl.engine.core_fields import untested
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.provider import provider_spec
from megatron_rl.launch import nccl
from megatron_rl.launch.heartbeats import LOADING
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.launch.status import StatusWriter
from megatron_rl.launch.watchdog import Watchdog, WatchSettings
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.trackers.registry import check_trackers
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout
from megatron_rl.records import Prompt
from megatron_rl.replay.compatibility import compatibility_line
from megatron_rl.rollout.agents.runner import check_agent
from megatron_rl.rollout.garbage import postpone_full_collections
from megatron_rl.rollout.recorder import forget_steps
from megatron_rl.trainer.batch_saver import BatchSaver
from megatron_rl.trainer.build_inference import make_inference
from megatron_rl.trainer.recording import Recording, start_recording
from megatron_rl.trainer.reporter import Reporter, make_sinks
from megatron_rl.trainer.rollout_source import LiveRollouts, RolloutSource
from megatron_rl.trainer.saved_rollouts import SavedRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.step_trace import StepTrace
from megatron_rl.trainer.token_recorder import TokenRecorder
from megatron_rl.trainer.trainer import Trainer


@contextmanager
def start_trainer(cfg: Config, rollouts: Path | None = None) -> Iterator[Trainer]:
    """A run that is ready for its first step: data read, model loaded, servers started, weights
    sent, parity checked.

    rollouts: a run directory whose saved rollouts are trained on, without servers, parity check and
    evaluation. Raises ValueError for bad input (before any server or model), RuntimeError for a
    server that fails its checks.
    """
    quiet_libraries()
    lines = LogLines(cfg.run.log_format, (cfg.rollout.api_key_env,))
    lines.catch_warnings()
    with ExitStack() as stack:
        inputs = read_inputs(cfg, is_live=rollouts is None)
        parallel = join_job(cfg, stack)
        status = stack.enter_context(make_status(cfg)) if parallel.rank == 0 else None
        watchdog = stack.enter_context(make_watchdog(cfg, parallel, lines, status))
        check_start(cfg, parallel, has_servers=rollouts is None)
        console = Console(enabled=parallel.rank == 0, lines=lines)
        recording = start_recording(cfg, parallel, stack)
        for line in [
            *(nccl.user_settings(os.environ) if parallel.device.type == "cuda" else ()),
            *inputs.lines,
        ]:
            console.log(line)
        watchdog.enter(LOADING)
        engine = Engine(cfg, parallel, total_updates=cfg.run.num_steps * cfg.run.num_mini_batches)
        console.log(compatibility_line(cfg, engine.core_config))
        if fields := untested(cfg.megatron.fields):
            console.log(
                f"untested with routing replay: {', '.join(f'megatron.{name}' for name in fields)}"
            )
        step_trace = stack.enter_context(StepTrace(cfg, parallel, recording.files))
        meter = StepMeter(watchdog, step_trace.trace)
        source = make_source(cfg, inputs, engine, meter, console, recording, stack, rollouts)
        if isinstance(source, LiveRollouts):
            inference = source.inference
            if source.leader is not None:
                source.leader.client.trace = source.leader.rewards.trace = step_trace.trace
            watchdog.waiting_for = inference.waiting_for
            if status is not None:
                status.urls = lambda: inference.urls
        watchdog.enter(LOADING)
        checkpointer = Checkpointer(
            engine, cfg.run_dir / "checkpoints", console.log, console.progress
        )
        policy = CheckpointPolicy(checkpointer, source.release_memory, recording.events)
        first_step, evaluated, tracker_ids = resume(policy, source, console)
        # until the first one begins, events are of the last finished step
        meter.step = first_step - 1
        sinks = (
            make_sinks(cfg, stack, console.log, tracker_ids, first_step)
            if parallel.rank == 0
            else None
        )
        if parallel.rank == 0:
            forget_steps(cfg.run_dir, first_step, parallel.dp_size)
        reporter = Reporter(cfg, console, sinks, status)
        stack.enter_context(recording.run(first_step, meter))
        source.start(first_step)
        stack.callback(postpone_full_collections())
        saver = BatchSaver(cfg, engine, console.log, recording.events)
        tokens = TokenRecorder(cfg, engine, recording.files)
        parts = (
            cfg,
            parallel,
            engine,
            source,
            policy,
            meter,
            reporter,
            saver,
            tokens,
            recording,
            step_trace,
        )
        yield Trainer(*parts, first_step, evaluated)


@dataclass(frozen=True)
class Inputs:
    """What a run reads first.

    lines: for the console; eval_sets: prompts by the name of their set.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    eval_sets: Mapping[str, Sequence[Prompt]]
    lines: Sequence[str]


def read_inputs(cfg: Config, *, is_live: bool) -> Inputs:
    """is_live: rollouts are sampled; else agent and evaluation are not used."""
    tokenizer = load_tokenizer(cfg.model.path)
    if cfg.agent.name and is_live:
        check_agent(cfg.agent, tokenizer)
    sets = {name: (path, cfg.eval_data) for name, path in cfg.eval.sets.items()} if is_live else {}
    # "": no set may have this name
    files = load_prompt_files({"": (cfg.data.train, cfg.data)} | sets, tokenizer)
    lines, train = [file.line(cfg.data) for file in files.values()], files.pop("")
    return Inputs(
        tokenizer,
        PromptSource(train.prompts, seed=cfg.run.seed, shuffle=cfg.data.shuffle),
        {name: file.prompts for name, file in files.items()},
        [*lines, *trained_on(train, files)],
    )


def join_job(cfg: Config, stack: ExitStack) -> Parallel:
    """This rank's process groups; the run's folder is this run's from here on."""
    if cfg.model.is_exact:
        disable_tf32()
    parallel = make_parallel(
        cfg.parallel,
        device=cfg.run.device,
        timeout_minutes=cfg.run.collective_timeout_minutes,
        seed=cfg.run.seed,
    )
    stack.callback(parallel.destroy)
    from_rank_0(lambda: check_trackers(cfg.track))
    from_rank_0(lambda: stack.enter_context(locked(cfg.run_dir)))
    cfg.run_dir.mkdir(parents=True, exist_ok=True)  # also on a machine that does not share it
    return parallel


def make_source(
    cfg: Config,
    inputs: Inputs,
    engine: Engine,
    meter: StepMeter,
    console: Console,
    recording: Recording,
    stack: ExitStack,
    rollouts: Path | None,
) -> RolloutSource:
    """From servers, which are started or found here, or from the run directory `rollouts`."""
    parallel, prompts, tokenizer = engine.parallel, inputs.prompts, inputs.tokenizer
    if rollouts is not None:
        recorder = recording.recorder(cfg, parallel) if cfg.rollout.save_tensors else None
        return SavedRollouts(
            cfg, parallel, engine.spec, prompts, rollouts, meter, console, tokenizer, recorder
        )
    meter.enter("starting or finding servers")
    inference, leader = make_inference(cfg, parallel, engine, tokenizer, stack, console, recording)
    arguments = (
        cfg,
        parallel,
        engine,
        tokenizer,
        prompts,
        inputs.eval_sets,
        inference,
        leader,
        meter,
        console,
    )
    return LiveRollouts(*arguments, events=recording.events)


def check_start(cfg: Config, parallel: Parallel, *, has_servers: bool) -> None:
    """Raise ValueError for a run that cannot start here.

    Collective: what concerns the GPUs is checked on rank 0.
    """
    check_can_release(cfg.rollout.release_memory, parallel.device.type)
    spec, world = provider_spec(cfg.model, parallel.device), parallel.world_size
    check_layout(spec, cfg, world)
    check_core(spec, cfg)

    def check() -> None:
        check_gpus(spec, cfg, world, this_machine(parallel), has_servers=has_servers)

    if parallel.device.type == "cuda":
        from_rank_0(check)


def this_machine(parallel: Parallel) -> Machine:
    """Rank 0's host.

    Its GPUs are counted by the driver: torch sees those of CUDA_VISIBLE_DEVICES alone.
    """
    device = torch.cuda.get_device_properties(parallel.device)
    # its rates are not used
    hardware = replace(HARDWARE["h100"], name=device.name, memory=float(device.total_memory))
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = len(list(driver.iterdir())) if driver.is_dir() else torch.cuda.device_count()
    return Machine(hardware, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus, os.environ)


def resume(
    policy: CheckpointPolicy, source: RolloutSource, console: Console
) -> tuple[int, int, dict[str, str]]:
    """Continue from a checkpoint, as [checkpoint] says; returns the number of finished steps, 0
    without a checkpoint, that of the last complete evaluation, and the ids of the trackers' runs,
    none where it is another run's checkpoint."""
    restored = policy.resume()
    if restored is None:
        return 0, -1, {}
    lines = source.restore(restored.progress, restored.path, restored.accepted)
    for line in [*restored.lines, *lines]:
        console.log(line)
    is_ours = restored.path.resolve().parent == policy.checkpointer.folder.resolve()
    evaluated = restored.progress.get("evaluated", restored.step)  # older checkpoints do not say
    return restored.step, evaluated, restored.progress.get("trackers", {}) if is_ours else {}


def make_status(cfg: Config) -> StatusWriter:
    """Keeps status.json, on rank 0."""
    return StatusWriter(
        cfg.run_dir,
        cfg.run.num_steps,
        api_key_env=cfg.rollout.api_key_env,
        stopped=(StoppedBySignal,),
    )


def make_watchdog(
    cfg: Config,
    parallel: Parallel,
    lines: LogLines | None = None,
    status: StatusWriter | None = None,
) -> Watchdog:
    """Names the rank that the others wait for.

    Its stage limit is shorter than that of collectives, which name no rank.
    """
    settings = WatchSettings(
        cfg.stage_seconds, cfg.run.silence_timeout_seconds, cfg.run_dir, agreed=(StoppedBySignal,)
    )
    watchdog = Watchdog(parallel.store(), parallel.rank, parallel.world_size, settings, lines=lines)
    if status is not None:
        watchdog.on_heartbeats, watchdog.on_verdict = status.beats, partial(status.close, "failed")
    return watchdog


def quiet_libraries() -> None:
    """Silence the warnings that libraries print on every start; those of the user's code stay
    visible.
    """
    for module in ("megatron", "torch", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\..*")
        logging.getLogger(module).setLevel(logging.ERROR)
    # core's checkpoints; raised in our name
    warnings.filterwarnings("ignore", message="Please use DTensor")
    logging.getLogger("httpx").setLevel(logging.WARNING)
