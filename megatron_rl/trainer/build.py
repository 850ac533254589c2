"""Build a Trainer: cheap checks first, then the model, then the source of rollouts.

On exit everything closes in reverse order.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.checkpointer import Checkpointer
from megatron_rl.checkpoint.config_diff import check_steps
from megatron_rl.checkpoint.lock import locked
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.checkpoint.state import make_moments
from megatron_rl.config import Config
from megatron_rl.config.rules.server_rules import check_can_release
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.data.prompt_files import eval_file, train_files
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.data.prompts import leaked_prompts, load_prompt_files, load_tokenizer
from megatron_rl.data.training_order import make_stream, source_line, used_up_line
from megatron_rl.distributed import Parallel, device_of, disable_tf32, from_rank_0, make_parallel
from megatron_rl.engine.core_fields import untested
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.provider import provider_spec
from megatron_rl.launch import allocator, nccl
from megatron_rl.launch.heartbeats import LOADING
from megatron_rl.launch.log_lines import LogLines
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.trackers.registry import check_trackers
from megatron_rl.plan.hardware import HARDWARE
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout, check_leaders
from megatron_rl.records import Prompt
from megatron_rl.replay.compatibility import compatibility_line
from megatron_rl.rollout.agents.runner import check_agent
from megatron_rl.rollout.garbage_collection import postpone_full_collections
from megatron_rl.rollout.saved.rollout_recorder import forget_steps
from megatron_rl.trainer.build_inference import make_inference
from megatron_rl.trainer.build_teachers import find_teachers
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.recording.saved_batches import SavedBatches
from megatron_rl.trainer.recording.token_recorder import TokenRecorder
from megatron_rl.trainer.reporter import Reporter, make_sinks
from megatron_rl.trainer.rollout_source import RolloutSource
from megatron_rl.trainer.saved_rollouts import SavedRollouts
from megatron_rl.trainer.services import RunServices, start_services
from megatron_rl.trainer.sft_rows import SftRows, SftSource
from megatron_rl.trainer.trainer import Trainer


@contextmanager
def start_trainer(
    cfg: Config, saved_run: Path | None = None, *, rows: SftRows | None = None
) -> Iterator[Trainer]:
    """Yield a run that is ready for its first step: data read, model loaded, servers started,
    weights sent, parity checked.

    saved_run: a run directory whose saved rollouts are trained on, without servers, parity check
    and evaluation.
    rows: trained on in the place of rollouts, without servers (SFT).
    Raises ValueError for bad input (before any server or model), RuntimeError for a
    server that fails its checks.
    """
    quiet_libraries()
    log_format = LogLines(cfg.run.log_format, hidden=cfg.key_variables)
    log_format.catch_warnings()
    with ExitStack() as stack:
        # cheap checks first: wrong input must not cost the time to load a model
        inputs = rows or read_inputs(cfg, is_live=saved_run is None)
        has_servers = saved_run is None and rows is None
        gpu_lines = prepare_gpus(cfg, has_servers=has_servers)
        parallel = join_job(cfg, stack)
        services = start_services(cfg, parallel, log_format, stack)
        console, recording = services.console, services.recording
        check_start(cfg, parallel, has_servers=has_servers)
        log_lines(console, gpu_lines)
        log_lines(console, inputs.lines)

        # the model, then servers or saved rollouts
        services.watchdog.enter(LOADING)
        engine = load_engine(cfg, parallel, console)
        source = make_source(cfg, services, inputs, engine, stack, saved_run)

        # the state of a checkpoint, before any weights are sent
        services.watchdog.enter(LOADING)  # again: make_source entered stages of its own
        policy = make_policy(cfg, services, engine, source)
        start = resume(cfg, policy, source, console)
        # until the first step begins, events belong to the last finished one
        services.meter.step = start.first_step - 1
        reporter = make_reporter(cfg, services, parallel, start, stack)
        # from here on events say when and why the run stops; then the first weight sync and parity
        stack.enter_context(recording.run(start.first_step, services.meter, is_new=start.is_new))
        source.start(start.first_step)
        batches = SavedBatches(cfg, parallel, console.log, recording.events, str(saved_run or ""))
        # last: what exists now lives until the end, and is left out of collections
        stack.callback(postpone_full_collections())
        yield Trainer(
            cfg=cfg,
            parallel=parallel,
            engine=engine,
            rollouts=source,
            checkpoint_policy=policy,
            meter=services.meter,
            reporter=reporter,
            saved_batches=batches,
            tokens=TokenRecorder(cfg, engine, recording.files),
            recording=recording,
            step_trace=services.step_trace,
            first_step=start.first_step,
            evaluated=start.evaluated,
        )


def log_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.log(line)


@dataclass(frozen=True)
class Inputs:
    """The files that a run reads first."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptStream
    eval_sets: Mapping[str, Sequence[Prompt]]
    """Prompts by the name of their evaluation set."""
    lines: Sequence[str]
    """Lines for the console."""


def read_inputs(cfg: Config, *, is_live: bool) -> Inputs:
    """Read tokenizer, prompts and evaluation sets.

    is_live: rollouts are sampled; otherwise agent and evaluation are not used.
    """
    tokenizer = load_tokenizer(cfg.model.path)
    if cfg.agent.name and is_live:
        check_agent(cfg.agent, tokenizer)
    names = list(cfg.eval.sets) if is_live else []
    files = load_prompt_files(
        {("data.train", name): file for name, file in train_files(cfg.data).items()}
        | {("eval.sets", name): eval_file(cfg, name) for name in names},
        tokenizer,
    )
    train = {name: file for (key, name), file in files.items() if key == "data.train"}
    sets = {name: file for (key, name), file in files.items() if key == "eval.sets"}
    prompts = {name: file.prompts for name, file in train.items()}
    stream = make_stream(cfg.data, prompts, cfg.run.seed)
    lines = [source_line(cfg.data, name) + file.line(cfg.data) for name, file in train.items()]
    lines += [file.line(cfg.data) for file in sets.values()]
    return Inputs(
        tokenizer,
        stream,
        {name: file.prompts for name, file in sets.items()},
        [*lines, *leaked_prompts(list(train.values()), sets), *used_up_line(stream, cfg.run)],
    )


def prepare_gpus(cfg: Config, *, has_servers: bool) -> list[str]:
    """Set up NCCL and torch's allocator before this rank uses its GPU; return lines about it.

    It has no effect on the CPU.
    """
    if device_of(cfg.run.device) == "cpu":
        return []
    lines = [allocator.allocator_line(cfg, os.environ, has_servers=has_servers)]
    if not allocator.reason_against(cfg, os.environ, has_servers=has_servers):
        allocator.grow_segments()
    if has_servers and cfg.rollout.weight_sync == "distributed":
        nccl.set_defaults(os.environ)  # servers that this process starts inherit it
        lines += nccl.user_settings(os.environ)
    return lines


def join_job(cfg: Config, stack: ExitStack) -> Parallel:
    """Make this rank's process groups and lock the run's folder."""
    if cfg.model.is_exact:
        disable_tf32()
    parallel = make_parallel(
        cfg.parallel,
        device=cfg.run.device,
        timeout_minutes=cfg.run.collective_timeout_minutes,
        seed=cfg.run.seed,
    )
    # first on the stack, so last at the end: what is stopped before may still use the groups
    stack.callback(parallel.destroy)
    # on rank 0, which alone sends to trackers
    from_rank_0(lambda: check_trackers(cfg.track))
    # on rank 0 alone: one process of a run holds the lock
    from_rank_0(lambda: stack.enter_context(locked(cfg.run_dir)))
    cfg.run_dir.mkdir(parents=True, exist_ok=True)  # also on a machine that does not share it
    return parallel


def load_engine(cfg: Config, parallel: Parallel, console: Console) -> Engine:
    """Load the model and make Adam's state; log what routing replay supports of the model, and
    which fields of [megatron] were never tested with replay.
    """
    engine = Engine(cfg, parallel, total_updates=cfg.run.num_steps * cfg.run.num_mini_batches)
    make_moments(engine)
    console.log(compatibility_line(cfg, engine.core_config))
    if fields := untested(cfg.megatron.fields):
        names = ", ".join(f"megatron.{name}" for name in fields)
        console.log(f"untested with routing replay: {names}")
    return engine


def make_source(
    cfg: Config,
    services: RunServices,
    inputs: Inputs | SftRows,
    engine: Engine,
    stack: ExitStack,
    saved_run: Path | None,
) -> RolloutSource:
    """Return the source of rollouts: servers, which are started or found here, the run directory
    `saved_run`, or rows that have their answers.
    """
    if isinstance(inputs, SftRows):
        return SftSource(cfg, engine, services.meter, inputs)
    parallel, recording = engine.parallel, services.recording
    if saved_run is not None:
        recorder = recording.recorder(cfg, parallel) if cfg.rollout.save_tensors else None
        return SavedRollouts(
            cfg=cfg,
            parallel=parallel,
            spec=engine.spec,
            prompts=inputs.prompts,
            folder=saved_run,
            meter=services.meter,
            console=services.console,
            tokenizer=inputs.tokenizer,
            recorder=recorder,
        )
    shared_teachers = None
    if cfg.teachers.with_servers:  # before the student's servers, which take minutes to start
        # a stage of its own: each of the two may take as long as the watchdog allows
        services.meter.enter("starting or finding teachers")
        prompts = inputs.prompts.prompts
        cfg, shared_teachers = find_teachers(cfg, engine, prompts, stack, services.console)
    services.meter.enter("starting or finding servers")
    inference, leader = make_inference(
        cfg, services, engine, inputs.tokenizer, stack, shared_teachers
    )
    services.watch(inference)
    return LiveRollouts(
        cfg=cfg,
        parallel=parallel,
        engine=engine,
        tokenizer=inputs.tokenizer,
        prompts=inputs.prompts,
        eval_sets=inputs.eval_sets,
        inference=inference,
        leader=leader,
        meter=services.meter,
        console=services.console,
        events=recording.events,
    )


def make_policy(
    cfg: Config, services: RunServices, engine: Engine, source: RolloutSource
) -> CheckpointPolicy:
    """Return what decides when checkpoints are written, in RUN/checkpoints."""
    console = services.console
    folder = RunFolder(cfg.run_dir).checkpoints
    checkpointer = Checkpointer(engine, folder, console.log, console.progress)
    return CheckpointPolicy(checkpointer, source.give_memory_to_trainer, services.recording.events)


def make_reporter(
    cfg: Config, services: RunServices, parallel: Parallel, start: StartPoint, stack: ExitStack
) -> Reporter:
    """Return the writer of step results.

    On rank 0 it first removes what an earlier process wrote about steps that are trained again, as
    far as nothing overwrites it (forget_steps).
    """
    console, sinks = services.console, None
    if parallel.rank == 0:
        sinks = make_sinks(
            cfg, stack, console.log, start.tracker_ids, start.first_step, is_new=start.is_new
        )
        forget_steps(cfg.run_dir, start.first_step, parallel.dp_size)
    return Reporter(cfg, console, sinks, services.status)


def check_start(cfg: Config, parallel: Parallel, *, has_servers: bool) -> None:
    """Raise ValueError for a run that cannot start here.

    Collective: rank 0 checks the GPUs.
    """
    check_can_release(cfg, parallel.device.type)
    spec, world = provider_spec(cfg.model, parallel.device), parallel.world_size
    check_layout(spec, cfg, world)
    if has_servers:
        check_leaders(cfg, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    check_core(spec, cfg)

    def check() -> None:
        check_gpus(spec, cfg, world, this_machine(parallel), has_servers=has_servers)

    if parallel.device.type == "cuda":
        from_rank_0(check)


def this_machine(parallel: Parallel) -> Machine:
    """Return rank 0's host.

    The driver counts its GPUs: torch sees only those of CUDA_VISIBLE_DEVICES.
    """
    device = torch.cuda.get_device_properties(parallel.device)
    # the checks use names and memory only, not the rates of an H100
    hardware = replace(
        HARDWARE["h100"],
        name=device.name,
        memory=float(device.total_memory),
        host_memory=float(psutil.virtual_memory().total),
    )
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = len(list(driver.iterdir())) if driver.is_dir() else torch.cuda.device_count()
    return Machine(hardware, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus, os.environ)


class StartPoint(NamedTuple):
    """The step at which the run starts or continues."""

    first_step: int = 0
    """Number of finished steps; 0 without a checkpoint."""
    evaluated: int = -1
    """Number of finished steps at this run's last complete evaluation; -1 before any."""
    tracker_ids: Mapping[str, str] = {}
    """Tracker -> id of its run; empty where the checkpoint is another run's."""
    is_new: bool = True
    """True if no checkpoint was loaded."""


def resume(
    cfg: Config, policy: CheckpointPolicy, source: RolloutSource, console: Console
) -> StartPoint:
    """Continue from a checkpoint, as [checkpoint] says.

    Raises ValueError where it has more finished steps than run.num_steps.
    """
    restored = policy.resume()
    if restored is None:
        return StartPoint()
    check_steps(restored.step, cfg, restored.path)
    lines = source.restore(restored.progress, restored.path, restored.accepted)
    log_lines(console, [*restored.lines, *lines])
    is_ours = restored.path.resolve().parent == policy.checkpointer.folder.resolve()
    # a checkpoint of another run starts a new run, in the trackers too; older checkpoints do not
    # say when they evaluated
    evaluated = restored.progress.get("evaluated", restored.step) if is_ours else -1
    tracker_ids = restored.progress.get("trackers", {}) if is_ours else {}
    return StartPoint(restored.step, evaluated, tracker_ids, is_new=False)


def quiet_libraries() -> None:
    """Silence the warnings that libraries print at every start; those of the user's code stay
    visible.
    """
    for module in ("megatron", "torch", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\..*")
        logging.getLogger(module).setLevel(logging.ERROR)
    # megatron-core's checkpoints cause it, but it names our module
    warnings.filterwarnings("ignore", message="Please use DTensor")
    logging.getLogger("httpx").setLevel(logging.WARNING)
