"""Rules about the servers that a run starts of teachers' checkpoints ([teachers.NAME] path)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.rules.server_gpus import visible_gpus
from megatron_rl.config.rules.server_rules import check_servers
from megatron_rl.config.sections import RolloutConfig, Teacher


def server_settings(teacher: Teacher, rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings of the server that the run starts of teacher.path."""
    return rollout.model_copy(
        update={
            "urls": (),
            "num_servers": 1,
            "gpus": teacher.gpus,
            "server_args": teacher.server_args,
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
    users = dict.fromkeys(cfg.rollout.gpus, "rollout.gpus")
    for name, teacher in cfg.teachers.with_servers.items():
        if teacher.path is None:
            continue
        try:
            check_servers(server_settings(teacher, cfg.rollout))
        except ValueError as error:
            yield f"teachers.{name}: {error}"
        for gpu in teacher.gpus:
            if gpu in users:
                yield (
                    f"teachers.{name}.gpus = {list(teacher.gpus)}: GPU {gpu} is in {users[gpu]},"
                    " whose server would share its memory; name another"
                )
            users[gpu] = f"teachers.{name}.gpus"


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
        if shared := [str(gpu) for gpu in teacher.gpus if str(gpu) in training]:
            raise ValueError(
                f"{setting}: training ranks run on GPU {', '.join(shared)} (they have"
                f" {', '.join(training)}); name GPUs outside torchrun's CUDA_VISIBLE_DEVICES"
            )
