"""The sections of the dry run's report, as lines of text."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Literal

from rich.console import Console
from rich.table import Table

from megatron_rl.config import Config
from megatron_rl.config.rules.teacher_servers import server_settings
from megatron_rl.config.sections import Teacher
from megatron_rl.config.sglang_settings import accepted, read_options
from megatron_rl.launch.allocator import allocator_line
from megatron_rl.models.cost import active_parameters
from megatron_rl.models.fit import queue_bytes, queue_prompts
from megatron_rl.models.known import PUBLISHED_DTYPE, find_spec, is_known
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import grid, memory
from megatron_rl.plan.grid import weight_sources
from megatron_rl.plan.hardware import GIB, Assumptions, Hardware
from megatron_rl.plan.host_memory import host_bytes, node_text, teacher_token_bytes
from megatron_rl.plan.lengths import lengths_of
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.phases import Phase, broadcast_bytes, num_devices
from megatron_rl.plan.refusals import Machine
from megatron_rl.plan.server_time import DecodeModel, configured_servers, score_seconds
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl.rollout.server.adapter_slots import slot_options
from megatron_rl.rollout.server.process import server_command

SLOW_SAMPLING = 10
"""Sampling time / training time of a step above which the report warns: the ranks then wait more
than nine tenths of their time for rollouts."""
MAX_RANKS_SHOWN = 64
KINDS = [field.name for field in fields(Memory)]
PASSES = {
    "none": ("rollout: the server's routers", "old-logprob: live routing", "update: live routing"),
    "R2": (
        "rollout: the server's routers",
        "old-logprob: live routing, recorded",
        "update: replays the record",
    ),
    "R3": (
        "rollout: the server's routers, expert ids returned",
        "old-logprob: replays them",
        "update: replays them",
    ),
}
"""replay.mode -> source of the routes of every pass."""


def phase_lines(
    phases: Sequence[Phase], machine: Machine, spec: ModelSpec, cfg: Config, world: int
) -> Iterator[str]:
    """Yield the memory of a GPU in every phase, and the host memory of a node's ranks."""
    hardware = machine.hardware
    for phase in phases:
        warning = "" if phase.total <= hardware.memory else "WARNING, more than the GPU has: "
        yield (
            f"{phase.name}: {warning}{gib(phase.trainer)} of the trainer + {gib(phase.servers)} of"
            f" servers = {gib(phase.total)} of {gib(int(hardware.memory))}"
        )
    of = f" of {gib(int(hardware.host_memory))}" if hardware.host_memory else ""
    rank = host_bytes(spec, cfg, world, machine.ranks)
    yield f"host memory of a node: {node_text(rank, machine.ranks)}{of}"


def rendered(table: Table) -> list[str]:
    """Return the table as lines of text."""
    console = Console(width=120, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def model_lines(spec: ModelSpec) -> Iterator[str]:
    """Yield the sizes of the model."""
    yield (
        f"{spec.architecture}: {spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary"
        f" {spec.vocab_size}"
    )
    if spec.moe_layers:
        yield (
            f"{len(spec.moe_layers)} MoE layers of {spec.num_experts} experts, {spec.top_k} per"
            " token"
        )
    total, active = memory.full_model(spec).total, active_parameters(spec)
    yield f"{millions(total)} parameters; a token is multiplied with {millions(active)}"


def rank_lines(spec: ModelSpec, cfg: Config, world: int, *, has_servers: bool) -> Iterator[str]:
    """Yield the layout and a table of the ranks of every pipeline rank and replica, and the
    allocator of ranks on GPUs.
    """
    p = cfg.parallel
    yield (
        f"{world} ranks = tp {p.tp} x cp {p.cp} x dp {grid.dp_size(p, world)} x pp {p.pp}; experts:"
        f" etp {p.expert_tp} x ep {p.ep} x copies {grid.expert_dp_size(p, world)} x pp {p.pp}"
    )
    yield from rendered(grid_table(spec, cfg, world))
    if cfg.run.device != "cpu":
        yield allocator_line(cfg, os.environ, has_servers=has_servers)


def grid_table(spec: ModelSpec, cfg: Config, world: int) -> Table:
    """Return a table with one row per pipeline rank and replica, and its ranks."""
    p = cfg.parallel
    columns = ("pipeline rank", "layers", "replica")
    table = Table(*columns, "ranks (tp together, cp apart)", "expert shards (ep)", box=None)
    shown = min(world, MAX_RANKS_SHOWN)
    places = [grid.place(rank, p, world) for rank in range(shown)]
    stages = [layer_ranges(spec, cfg, pp) for pp in range(p.pp)]
    for pp, replica in dict.fromkeys((place.pp, place.replica) for place in places):
        members = [place for place in places if (place.pp, place.replica) == (pp, replica)]
        groups = [
            " ".join(str(place.rank) for place in members if place.cp == cp) for cp in range(p.cp)
        ]
        experts = " ".join(dict.fromkeys(str(place.ep) for place in members))
        table.add_row(str(pp), stages[pp], str(replica), " | ".join(groups), experts)
    if shown < world:
        table.add_row("...", "", "", f"up to {world - 1}", "")
    return table


def layer_ranges(spec: ModelSpec, cfg: Config, pp_rank: int) -> str:
    """Return the first and last layer of every chunk of a pipeline rank, as text."""
    chunks = grid.stage_layers(spec, cfg.parallel)[pp_rank :: cfg.parallel.pp]
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in chunks if chunk)


def step_lines(spec: ModelSpec, cfg: Config, world: int, per_node: int) -> Iterator[str]:
    """Yield the responses, updates, tokens and micro-batches of a step.

    per_node: ranks of a node.
    """
    run, replicas = cfg.run, grid.dp_size(cfg.parallel, world)
    responses = run.prompts_per_step * run.group_size
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    tokens = responses * longest
    updates = run.num_steps * run.num_mini_batches
    where = f"{responses // replicas:,} on each of {replicas}" if replicas > 1 else "all on one"
    yield (
        f"{run.prompts_per_step} prompts x {run.group_size} responses = {responses:,} responses,"
        f" {where} data-parallel replica{'s' * (replicas > 1)}"
    )
    per_step, steps = amount(run.num_mini_batches, "update"), amount(run.num_steps, "step")
    size = responses // run.num_mini_batches
    yield f"{per_step} of {size:,}; {steps}, {amount(updates, 'update')}"
    yield (
        f"at most {tokens:,} tokens (prompts of {cfg.data.max_prompt_tokens:,}, responses of "
        f"{cfg.rollout.max_response_tokens:,})"
    )
    rows = grid.most_rows(cfg)
    batches = amount(-(-tokens // (replicas * rows)), "micro-batch", "micro-batches")
    yield f"at most about {batches} of {rows:,} rows on every replica"
    routes = memory.host_route_bytes(spec, cfg, tokens // replicas)
    if routes:
        one = memory.host_route_bytes(spec, cfg, longest)
        copies = memory.route_copies(cfg.parallel, world, per_node)
        of = "replica" if cfg.parallel.share_host_memory else "rank"
        yield (
            f"expert ids: at most {gib(copies * routes)} on each node, {gib(routes)} for each"
            f" {of} there, {gib(one)} for the longest response"
        )
    if cfg.rollout.steps_ahead:
        most, at_once = queue_prompts(cfg) / replicas, cfg.rollout.max_concurrency
        yield (
            f"sampled ahead: at most {most:,.0f} prompts of each replica,"
            f" {gib(int(queue_bytes(cfg, spec) / replicas))} on its leader's host;"
            f" {'all' if at_once >= most else f'at most {at_once:,}'} are requested at a time"
            " (rollout.max_concurrency)"
        )


def amount(count: int, noun: str, nouns: str = "") -> str:
    """Return the count with its noun, in the plural (`nouns`, or with an s) unless it is 1."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def routing_lines(cfg: Config) -> Sequence[str]:
    """Return the source of the routes of every pass."""
    lines = [f"replay.mode = {cfg.replay.mode}", *PASSES[cfg.replay.mode]]
    if cfg.replay.measure:
        lines.append("expert ids of rollouts are compared with the trainer's (replay.measure)")
    return lines


def server_lines(spec: ModelSpec, cfg: Config, assumed: Assumptions) -> Iterator[str]:
    """Yield the servers that the run attaches to or starts, with their command, and the memory that
    a weight sync takes on their GPUs.
    """
    yield from started_lines(cfg)
    sampled = cfg.run.prompts_per_step * cfg.run.group_size * cfg.rollout.max_response_tokens
    for name, teacher in cfg.teachers.with_servers.items():
        sources = ", ".join(teacher.sources) or "all of data.train"
        size = teacher_token_bytes(cfg)
        place = (
            f"not asked here: {', '.join(teacher.urls)}"
            if teacher.path is None
            else f"started by the run: {shlex.join(teacher_command(cfg, teacher))}"
        )
        if teacher.release_memory:
            place += "; its weights wait in host memory while it does not score"
        yield (
            f"teacher {name} of {sources}, {place}; scores at most {sampled:,} sampled tokens a"
            f" step, {size} bytes each"
        )
    if cfg.run.device != "cpu" and cfg.rollout.weight_sync == "distributed":
        yield (
            f"a weight sync takes {gib(broadcast_bytes(spec, cfg, assumed))} on each of their GPUs"
            f" beside --mem-fraction-static, computed: {amount(weight_sources(cfg), 'source')} with"
            f" {assumed.communicator:g} GiB of nccl's buffers (assumed), and twice a bucket"
        )


def teacher_command(cfg: Config, teacher: Teacher) -> list[str]:
    """Return the command of the server that the run starts of teacher.path."""
    assert teacher.path is not None, "a teacher with urls"
    rollout = server_settings(teacher, cfg.rollout)
    if is_known(teacher.path):
        rollout = rollout.model_copy(update={"dtype": PUBLISHED_DTYPE})
    device: Literal["cpu", "cuda"] = "cpu" if cfg.run.device == "cpu" else "cuda"
    return server_command(teacher.path, rollout, device=device, port=0, seed=0, want_routes=False)


def started_lines(cfg: Config) -> Iterator[str]:
    """Yield the addresses of attached servers, or the command of those that the run starts."""
    if cfg.rollout.urls:
        yield f"attached: {', '.join(cfg.rollout.urls)}"
        return
    device: Literal["cpu", "cuda"] = "cpu" if cfg.run.device == "cpu" else "cuda"
    rollout = cfg.rollout
    # dtype = auto is read from the checkpoint, which a well-known model does not have
    if is_known(cfg.model.path) and rollout.dtype == "auto":
        rollout = rollout.model_copy(update={"dtype": PUBLISHED_DTYPE})
    args = (*slot_options(cfg, device), *rollout.server_args)
    command = server_command(
        cfg.model.path,
        rollout.model_copy(update={"server_args": args}),
        device=device,
        port=rollout.port,
        seed=cfg.run.seed,
        want_routes=cfg.needs_routes,
        weight_version="unpushed",
    )
    yield (
        f"{cfg.rollout.num_servers} started by rank 0 (port 0: a free one), weight sync:"
        f" {cfg.rollout.weight_sync}"
    )
    yield " ".join(command)
    yield from accepted(
        read_options(rollout.server_args), rollout.allow_unproven, needs_routes=cfg.needs_routes
    )


def memory_lines(spec: ModelSpec, cfg: Config, world: int, assumed: Assumptions) -> Iterator[str]:
    """Yield a table of the memory of every pipeline rank, and the memory of a save on the rank that
    needs most.
    """
    table = Table("pipeline rank", "parameters", *KINDS, "total", box=None)
    stages = range(cfg.parallel.pp)
    for pp in stages:
        parameters = memory.rank_parameters(spec, cfg.parallel, pp, te=grid.wants_te(cfg))
        used = memory.rank_memory(spec, cfg, world, pp, skew=assumed.skew)
        cells = [gib(getattr(used, name)) for name in KINDS]
        table.add_row(str(pp), f"{parameters.total:,}", *cells, gib(used.total))
    yield from rendered(table)
    most = max(memory.checkpoint_bytes_of_rank(spec, cfg, world, pp) for pp in stages)
    yield (
        f"saving a checkpoint: {gib(most)} of host memory on each rank, which it writes; none on"
        " the device"
    )


def time_lines(trainer: TrainingModel) -> Iterator[str]:
    """Yield the memory of the servers, and a line per stage of a step with its largest parts."""
    spec, cfg, hardware, assumed = trainer.spec, trainer.cfg, trainer.hardware, trainer.assumed
    servers = DecodeModel(spec, configured_servers(spec, cfg, hardware, assumed), hardware, assumed)
    room = max(0, int(servers.cached_tokens()))
    yield (
        f"servers x devices: {servers.server_pool.num} x {servers.server_pool.devices},"
        f" {gib(int(servers.weight_bytes()))} of weights on each, KV cache"
        f" {gib(int(room * servers.cache_bytes()))} for {room:,} tokens"
        f" ({servers.cache_bytes() / 1024:.1f} KiB each)"
    )
    lengths = lengths_of(cfg, assumed)
    prompt = assumed.mean_prompt * cfg.data.max_prompt_tokens
    yield (
        f"prompts of {prompt:,.0f} and responses of {lengths.mean:,.0f} tokens on average,"
        " exponential up to the cap"
    )
    try:
        step = trainer.step(servers.server_pool)
        old_logprob, update, sampling = step.old_logprob, step.update, step.rollout
        idle = f"{sampling.tail / sampling.total:.0%} of it with idle slots"
        yield (
            f"rollout      {seconds_text(sampling.total)}: up to {sampling.slots:,.0f} concurrent"
            f" requests on a server, {idle}"
        )
    except ValueError as error:
        step = None
        old_logprob, update = trainer.training()
        yield f"rollout      cannot be computed: {error}"
    yield from score_lines(cfg, hardware, assumed, None if step is None else step.rollout.total)
    yield f"old-logprob  {seconds_text(old_logprob.total)}: {old_logprob.largest()}"
    yield f"update       {seconds_text(update.total)}: {update.largest()}"
    if step is None:
        return
    yield f"weight sync  {seconds_text(step.weight_sync)}"
    order = (
        "sampled while the previous one trains" if step.overlaps else "one stage after the other"
    )
    teachers = teacher_seconds(cfg, hardware, assumed)
    waited = sum(teachers[name] for name in cfg.teachers.time_shared)
    yield f"a step       {seconds_text(step.total + waited)}, {order}"
    training = old_logprob.total + update.total
    if sampling.total > SLOW_SAMPLING * training:
        devices = servers.server_pool.num * servers.server_pool.devices
        yield (
            f"WARNING      sampling takes {sampling.total / training:.0f} times as long as"
            f" training: {devices} server device(s) for {trainer.world} ranks; raise"
            " rollout.num_servers or attach more servers with rollout.urls"
        )


def score_lines(
    cfg: Config, hardware: Hardware, assumed: Assumptions, sampling: float | None
) -> Iterator[str]:
    """Yield the seconds of every teacher whose server the run starts; sampling: those of a step's
    sampling, None where they are not known.
    """
    for name, seconds in teacher_seconds(cfg, hardware, assumed).items():
        teacher = cfg.teachers.by_name[name]
        when = "when all are sampled" if teacher.release_memory else "while others are sampled"
        yield (
            f"teacher      {seconds_text(seconds)}: {name} on"
            f" {amount(num_devices(teacher), 'device')} scores all prompts and responses, {when}"
        )
        if not teacher.release_memory and sampling is not None and seconds > sampling:
            yield (
                f"WARNING      teacher {name} takes {seconds / sampling:.1f} times as long as"
                f" sampling: give it more devices (teachers.{name}.gpus)"
            )


def teacher_seconds(cfg: Config, hardware: Hardware, assumed: Assumptions) -> dict[str, float]:
    """Return name -> seconds of a step of the teachers whose servers the run starts."""
    return {
        name: score_seconds(cfg, find_spec(teacher.path), num_devices(teacher), hardware, assumed)
        for name, teacher in cfg.teachers.with_servers.items()
        if teacher.path is not None
    }


def seconds_text(value: float) -> str:
    return f"{value:8.1f} s" if value >= 1 else f"{1e3 * value:7.1f} ms"


def gib(size: int) -> str:
    """Return bytes as text in GiB, or in MiB below a tenth of a GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.2f} MiB"


def millions(count: int) -> str:
    """Return a count as text in millions (M), or in billions (G) from 10^9 on."""
    return f"{count / 1e9:.2f} G" if count >= 10**9 else f"{count / 1e6:.2f} M"
