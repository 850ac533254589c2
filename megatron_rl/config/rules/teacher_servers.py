"""Rules about the servers that a run starts of teachers' checkpoints ([teachers.NAME] path)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.rules.server_gpus import visible_gpus
from megatron_rl.config.rules.server_rules import check_servers
from megatron_rl.config.sections import RolloutConfig, Teacher

MEMORY_OPTIONS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""SGLang's options of a server that releases its GPU memory and gets the same weights back."""


def server_settings(teacher: Teacher, rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings of the server that the run starts of teacher.path."""
    return rollout.model_copy(
        update={
            "urls": (),
            "num_servers": 1,
            "gpus": teacher.gpus,
            "server_args": (
                *(MEMORY_OPTIONS if teacher.release_memory else ()),
                *teacher.server_args,
            ),
            "api_key_env": teacher.api_key_env,
            "dtype": "auto",  # the checkpoint's: the student's may be another
            "port": 0,
            "weight_sync": "distributed",
            "weight_update": "drain",
            "release_memory": False,
        }
    )


def started_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with the servers that the run starts of teachers' checkpoints."""
    rollout = cfg.rollout
    users = dict.fromkeys(rollout.gpus, ("rollout", rollout.release_memory))
    for name, teacher in cfg.teachers.with_servers.items():
        if teacher.path is None:
            continue
        try:
            check_servers(server_settings(teacher, rollout))
        except ValueError as error:
            yield f"teachers.{name}: {error}"
        if teacher.release_memory and rollout.steps_ahead:
            yield (
                f"teachers.{name}.release_memory = true with rollout.max_staleness ="
                f" {rollout.max_staleness}, partial = {rollout.partial}: the teacher scores when"
                " sampling has ended, and these sample the next step meanwhile; set max_staleness"
                " to 0, or release_memory = false and gpus of its own"
            )
        for gpu in teacher.gpus:
            user, can_share = users.get(gpu, ("", True))
            if user and not (can_share and teacher.release_memory):
                yield (
                    f"teachers.{name}.gpus = {list(teacher.gpus)}: GPU {gpu} is in {user}.gpus,"
                    " whose server would share its memory; name another, or let both use it in"
                    f" turn: release_memory = true of {user} and of teachers.{name}"
                )
            users[gpu] = (f"teachers.{name}", teacher.release_memory)


def check_teacher_gpus(
    cfg: AllSections, local_ranks: int, host_gpus: int, environ: Mapping[str, str]
) -> None:
    """Raise ValueError for a teacher that the run serves on GPUs of others, or on none.

    local_ranks: training ranks on the host of rank 0, which have `environ`.  host_gpus: its GPUs.
    """
    training = visible_gpus(environ, local_ranks)[:local_ranks]
    for name, teacher in cfg.teachers.with_servers.items():
        if teacher.path is None:
            continue
        setting = f"teachers.{name}.gpus = {list(teacher.gpus)}"
        if not teacher.gpus:
            raise ValueError(
                f"{setting} with path = {teacher.path}: must name the GPUs of its server, which no"
                " training rank and no other server uses; set it, or start the server yourself and"
                " set urls"
            )
        if absent := [str(gpu) for gpu in teacher.gpus if gpu >= host_gpus]:
            raise ValueError(
                f"{setting}: the host of rank 0 has GPUs 0 to {host_gpus - 1}, not"
                f" {', '.join(absent)}; name others, or start the server on another host and set"
                " urls"
            )
        if teacher.release_memory and cfg.rollout.release_memory:
            continue
        if shared := [str(gpu) for gpu in teacher.gpus if str(gpu) in training]:
            raise ValueError(
                f"{setting}: training ranks run on GPU {', '.join(shared)} (they have"
                f" {', '.join(training)}); name GPUs outside torchrun's CUDA_VISIBLE_DEVICES,"
                " or let both use them in turn: release_memory = true of rollout and of"
                f" teachers.{name}"
            )
