"""What `--dry-run` prints: everything that a configuration implies, or each rule it breaks; without
torch or a GPU.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from megatron_rl.config import Config, ModelConfig, dump_config, load_config
from megatron_rl.config.sglang_settings import accepted, read_options
from megatron_rl.models.cost import active_parameters
from megatron_rl.models.families import make_spec
from megatron_rl.models.fit import length_problems, queue_bytes, queue_prompts
from megatron_rl.models.known import KNOWN, find_spec, is_known
from megatron_rl.models.spec import ModelError, ModelSpec, load_hf_config
from megatron_rl.plan import grid, memory
from megatron_rl.plan.hardware import (
    GIB,
    HARDWARE,
    Assumptions,
    Hardware,
    find_hardware,
    read_assumptions,
)
from megatron_rl.plan.lengths import lengths_of
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.phases import Phase, host_bytes
from megatron_rl.plan.preflight import check_files
from megatron_rl.plan.refusals import Machine, check_core, check_gpus, check_layout, planned_machine
from megatron_rl.plan.server_time import DecodeModel, configured_servers
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl.rollout.saved_run import check_config
from megatron_rl.rollout.server.process import server_command

MAX_RANKS_SHOWN = 64
MEMORY_TITLE = (
    "Memory per rank, computed, at a full micro-batch; without the framework, CUDA and nccl"
)
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


def print_report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the report of the options of training (options.parse); the exit status is 2 where a run
    would be refused.
    """
    try:
        cfg = load_config(arguments.config, overrides)
        if arguments.from_rollouts is not None:
            check_config(arguments.from_rollouts, cfg)
        hardware = find_hardware(arguments.gpu) if arguments.gpu else None
        assumed = read_assumptions(arguments.assume)
        print(
            report(
                cfg, arguments.gpus, hardware, assumed, has_servers=arguments.from_rollouts is None
            )
        )
    except ValueError as error:
        print(f"megatron-rl dry-run: {error}", file=sys.stderr)
        return 2
    return 0


def report(
    cfg: Config,
    world_size: int | None = None,
    hardware: Hardware | None = None,
    assumed: Assumptions = Assumptions(),  # noqa: B008  (frozen)
    *,
    has_servers: bool = True,
) -> str:
    """Check `cfg` against its model; return, as TOML with comments, what it will do on `world_size`
    ranks of this hardware.

    has_servers: False for training on saved rollouts.
    Defaults: WORLD_SIZE, else the fewest ranks that fit; H100, or a CPU with run.device = cpu.
    Raises ValueError (ModelError for the model) for what would be refused at start-up; it names
    key, value, rule and fix.
    """
    is_name = is_known(cfg.model.path)
    spec = find_spec(cfg.model.path) if is_name else model_spec(cfg.model)
    world = (
        world_size or int(os.environ.get("WORLD_SIZE", "0")) or grid.smallest_world(cfg.parallel)
    )
    hardware = hardware or HARDWARE["cpu" if cfg.run.device == "cpu" else "h100"]
    check_layout(spec, cfg, world)
    not_checked = [NO_FILES.format(name=cfg.model.path)] if is_name else check_files(cfg, spec)
    if is_name and has_servers and (problems := list(length_problems(cfg, spec))):
        raise ValueError("\n".join(problems))
    not_checked += check_core(spec, cfg)
    in_phases, notes = gpu_notes(
        spec, cfg, world, planned_machine(world, hardware, assumed), has_servers
    )
    not_checked += notes
    sections = {
        "Model": model_lines(spec),
        "Ranks": [*rank_lines(cfg, world), *rendered(grid_table(spec, cfg, world))],
        "One step": step_lines(spec, cfg, world),
        "Routing": routing_lines(cfg),
        "Servers": server_lines(cfg),
        "Not checked here": not_checked,
        MEMORY_TITLE: [
            *rendered(memory_table(spec, cfg, world)),
            checkpoint_line(spec, cfg, world),
        ],
        **(
            {f"Memory of a GPU by phase, computed for {hardware.name}": in_phases}
            if in_phases
            else {}
        ),
        f"Step time, computed for {hardware.name} (--gpu, --assume); not measured": time_lines(
            TrainingModel(spec, cfg, world, hardware, assumed)
        ),
    }
    comments = [
        line
        for title, lines in sections.items()
        for line in ("", title, *(f"  {each}" for each in lines))
    ]
    return dump_config(cfg) + "\n".join(f"# {line}".rstrip() for line in comments)


def model_spec(model: ModelConfig) -> ModelSpec:
    """The sizes of a checkpoint.

    Those of model.provider = bridge come from Megatron-Bridge itself.
    """
    if model.provider == "native":
        return make_spec(read_hf_config(model.path))
    from megatron_rl.engine.provider import provider_spec  # imports torch and core: seconds

    return provider_spec(model)


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Raises ModelError; for a missing directory with the names to plan with.
    """
    try:
        return load_hf_config(path)
    except ModelError as error:
        if path.exists():
            raise
        raise ModelError(
            f"{error}; to plan with published sizes, --model.path {', '.join(KNOWN)}"
        ) from error


SLOW_SAMPLING = (
    # times the training of a step: below it the ranks wait less than nine tenths of their time for
    # rollouts
    10
)
NO_FILES = (
    "model.path = {name}: published sizes, to plan with; a run needs a checkpoint there, and no"
    " file was checked"
)


def gpu_notes(
    spec: ModelSpec, cfg: Config, world: int, machine: Machine, has_servers: bool
) -> tuple[list[str], list[str]]:
    """(memory in each phase, what is not checked here).  Raises ValueError for what cannot start on
    GPUs, with run.device = cuda; with auto, where this machine may have no GPU, the message is a
    note."""
    if cfg.run.device == "cpu":
        return [], []
    try:
        found = check_gpus(spec, cfg, world, machine, has_servers=has_servers)
    except ValueError as error:
        if cfg.run.device == "cuda":
            raise
        return [], [f"run.device = auto: refused on a machine with GPUs: {error}"]
    return list(phase_lines(found, machine.hardware, spec, cfg, world)), []


def phase_lines(
    found: Sequence[Phase], hardware: Hardware, spec: ModelSpec, cfg: Config, world: int
) -> Iterator[str]:
    for phase in found:
        warning = "" if phase.total <= hardware.memory else "WARNING, more than the GPU has: "
        yield (
            f"{phase.name}: {warning}{gib(phase.trainer)} of the trainer + {gib(phase.servers)} of"
            f" servers = {gib(phase.total)} of {gib(int(hardware.memory))}"
        )
    if on_host := host_bytes(spec, cfg, world):
        yield (
            f"on each rank's host while the servers sample: {gib(on_host)} of weights and optimizer"
            " state, pinned"
        )


def rendered(table: Table) -> list[str]:
    """The table as lines of text."""
    console = Console(width=120, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def model_lines(spec: ModelSpec) -> Iterator[str]:
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


def rank_lines(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    yield (
        f"{world} ranks = tp {p.tp} x cp {p.cp} x dp {grid.dp_size(p, world)} x pp {p.pp}; experts:"
        f" etp {p.expert_tp} x ep {p.ep} x copies {grid.expert_dp_size(p, world)} x pp {p.pp}"
    )


def grid_table(spec: ModelSpec, cfg: Config, world: int) -> Table:
    """One row per pipeline rank and replica, with its ranks."""
    p = cfg.parallel
    table = Table(
        "pipeline rank",
        "layers",
        "replica",
        "ranks (tp together, cp apart)",
        "expert shards (ep)",
        box=None,
    )
    shown = min(world, MAX_RANKS_SHOWN)
    places = [grid.place(rank, p, world) for rank in range(shown)]
    seen = dict.fromkeys((each.pp, each.replica) for each in places)
    stages = [layer_ranges(spec, cfg, pp) for pp in range(p.pp)]
    for pp, replica in seen:
        members = [each for each in places if (each.pp, each.replica) == (pp, replica)]
        groups = [
            " ".join(str(each.rank) for each in members if each.cp == cp) for cp in range(p.cp)
        ]
        experts = " ".join(dict.fromkeys(str(each.ep) for each in members))
        table.add_row(str(pp), stages[pp], str(replica), " | ".join(groups), experts)
    if shown < world:
        table.add_row("...", "", "", f"up to {world - 1}", "")
    return table


def layer_ranges(spec: ModelSpec, cfg: Config, pp_rank: int) -> str:
    chunks = memory.stage_layers(spec, cfg.parallel)[pp_rank :: cfg.parallel.pp]
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in chunks if chunk)


def step_lines(spec: ModelSpec, cfg: Config, world: int) -> Iterator[str]:
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
    each, steps = amount(run.num_mini_batches, "update"), amount(run.num_steps, "step")
    yield f"{each} of {responses // run.num_mini_batches:,}; {steps}, {amount(updates, 'update')}"
    yield (
        f"at most {tokens:,} tokens (prompts of {cfg.data.max_prompt_tokens:,}, responses of "
        f"{cfg.rollout.max_response_tokens:,})"
    )
    least = -(-tokens // (replicas * run.max_tokens_per_micro_batch))
    batches = amount(least, "micro-batch", "micro-batches")
    yield f"at most about {batches} of {run.max_tokens_per_micro_batch:,} rows on every replica"
    routes = memory.host_route_bytes(spec, cfg, tokens // replicas)
    if routes:
        one = memory.host_route_bytes(spec, cfg, longest)
        yield (
            f"expert ids: at most {gib(routes)} on each rank's host, {gib(one)} for the longest"
            " response"
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
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def routing_lines(cfg: Config) -> Sequence[str]:
    measured = (
        ["expert ids of rollouts are compared with the trainer's (replay.measure)"]
        if cfg.replay.measure
        else []
    )
    return [f"replay.mode = {cfg.replay.mode}", *PASSES[cfg.replay.mode], *measured]


def server_lines(cfg: Config) -> Iterator[str]:
    if cfg.rollout.urls:
        yield f"attached: {', '.join(cfg.rollout.urls)}"
        return
    device: Literal["cpu", "cuda"] = "cpu" if cfg.run.device == "cpu" else "cuda"
    rollout = cfg.rollout
    # auto is read from the checkpoint, which does not exist
    if is_known(cfg.model.path) and rollout.dtype == "auto":
        rollout = rollout.model_copy(update={"dtype": cfg.model.dtype})
    command = server_command(
        cfg.model.path, rollout, device=device, port=rollout.port, seed=cfg.run.seed,
        want_routes=cfg.needs_routes, weight_version="unpushed",
    )  # fmt: skip
    yield (
        f"{cfg.rollout.num_servers} started by rank 0 (port 0: a free one), weight sync:"
        f" {cfg.rollout.weight_sync}"
    )
    yield " ".join(command)
    yield from accepted(
        read_options(rollout.server_args), rollout.allow_unproven, needs_routes=cfg.needs_routes
    )


def memory_table(spec: ModelSpec, cfg: Config, world: int) -> Table:
    table = Table("pipeline rank", "parameters", *KINDS, "total", box=None)
    for pp in range(cfg.parallel.pp):
        held = memory.rank_parameters(spec, cfg.parallel, pp, te=memory.wants_te(cfg))
        found = memory.rank_memory(spec, cfg, world, pp)
        cells = [gib(getattr(found, name)) for name in KINDS]
        table.add_row(str(pp), f"{held.total:,}", *cells, gib(found.total))
    return table


def checkpoint_line(spec: ModelSpec, cfg: Config, world: int) -> str:
    """Memory of a save, of the rank that needs most."""
    most = max(
        memory.checkpoint_bytes_of_rank(spec, cfg, world, pp) for pp in range(cfg.parallel.pp)
    )
    return (
        f"saving a checkpoint: {gib(most)} of host memory on each rank, which it writes; none on"
        " the device"
    )


def time_lines(trainer: TrainingModel) -> Iterator[str]:
    """Memory of the servers, and one line for each stage of a step with its largest parts."""
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
        found = trainer.step(servers.server_pool)
        old_logprob, update, sampling = found.old_logprob, found.update, found.rollout
        idle = f"{sampling.tail / sampling.total:.0%} of it with idle slots"
        yield (
            f"rollout      {seconds_text(sampling.total)}: up to {sampling.slots:,.0f} concurrent"
            f" requests on a server, {idle}"
        )
    except ValueError as error:
        found = None
        old_logprob, update = trainer.training()
        yield f"rollout      cannot be computed: {error}"
    yield f"old-logprob  {seconds_text(old_logprob.total)}: {old_logprob.largest()}"
    yield f"update       {seconds_text(update.total)}: {update.largest()}"
    if found is not None:
        yield f"weight sync  {seconds_text(found.weight_sync)}"
        order = (
            "sampled while the previous one trains"
            if found.overlaps
            else "one stage after the other"
        )
        yield f"a step       {seconds_text(found.total)}, {order}"
        training = old_logprob.total + update.total
        if sampling.total > SLOW_SAMPLING * training:
            devices = servers.server_pool.num * servers.server_pool.devices
            yield (
                f"WARNING      sampling takes {sampling.total / training:.0f} times as long as"
                f" training: {devices} server device(s) for {trainer.world} ranks; raise"
                " rollout.num_servers or attach more servers with rollout.urls"
            )


def seconds_text(value: float) -> str:
    return f"{value:8.1f} s" if value >= 1 else f"{1e3 * value:7.1f} ms"


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.2f} MiB"


def millions(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 10**9 else f"{count / 1e6:.2f} M"
