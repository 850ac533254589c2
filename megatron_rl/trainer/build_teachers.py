"""The teachers of a run: their servers, and those that share GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import httpx
import numpy as np

from megatron_rl.config import Config
from megatron_rl.distributed import from_rank_0
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.console import Console
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.teacher_check import check_teachers, probe, text_for
from megatron_rl.rollout.server.server_info import auth_headers
from megatron_rl.rollout.server.teacher_servers import checkpoint_problems, start_teachers
from megatron_rl.rollout.time_shared_teachers import SleepingTeacher, TimeSharedTeachers
from megatron_rl.trainer.build_inference import device_type, leave_gpus
from megatron_rl.weights.sync.servers import Servers


def find_teachers(
    cfg: Config, engine: Engine, prompts: Sequence[Prompt], stack: ExitStack, console: Console
) -> tuple[Config, TimeSharedTeachers | None]:
    """Start or find the teachers' servers and check them; return the configuration with their
    addresses, and the teachers that have GPU memory only while they score.  Collective.
    """
    parallel, spec, names = engine.parallel, engine.spec, cfg.teachers.time_shared
    others = [name for name in cfg.teachers.by_name if name not in names]
    sleepers: dict[str, SleepingTeacher] = {}

    def find() -> tuple[dict[str, tuple[str, ...]], list[str]]:
        if problems := list(checkpoint_problems(cfg, spec.vocab_size)):
            raise ValueError("\n".join(problems))
        urls: dict[str, tuple[str, ...]] = {}
        lines: list[str] = []
        # those that share GPUs start last, each when the one before has released its memory
        for part in [others, *([name] for name in names)]:
            some = cfg.model_copy(update={"teachers": cfg.teachers.only(part)})
            started = start_teachers(some, device_type(parallel), stack, console.log)
            urls |= started
            some = with_addresses(some, started)
            lines += check_teachers(some, spec, prompts)
            for name in set(part) & set(names):
                sleepers[name] = sleeping_teacher(some, name, spec, prompts, stack)
        return urls, lines

    if names and cfg.rollout.release_memory:
        leave_gpus(engine)
    urls, lines = from_rank_0(find, parallel.host_group)
    for line in lines:
        console.log(line)
    shared = TimeSharedTeachers(names, sleepers, parallel.host_group) if names else None
    return with_addresses(cfg, urls), shared


def sleeping_teacher(
    cfg: Config, name: str, spec: ModelSpec, prompts: Sequence[Prompt], stack: ExitStack
) -> SleepingTeacher:
    """Return the control of a running teacher's server, which was woken once, and has released its
    memory.
    """
    teacher, text = cfg.teachers.by_name[name], text_for(cfg, name, prompts)
    rollout = cfg.rollout.model_copy(update={"api_key_env": teacher.api_key_env})
    headers = auth_headers(rollout, f"teachers.{name}.api_key_env")
    servers = Servers(teacher.urls, headers, rollout.weight_sync_timeout_seconds)
    stack.callback(servers.close)

    def score() -> np.ndarray | None:
        if text is None:
            return None
        timeout = rollout.probe_seconds("cuda")
        with httpx.Client(
            base_url=teacher.urls[0], headers=headers, timeout=timeout, trust_env=False
        ) as http:
            return probe(http, text, spec)

    sleeper = SleepingTeacher(name, servers, score)
    sleeper.release()
    sleeper.wake()  # before hours of sampling
    sleeper.release()
    return sleeper


def with_addresses(cfg: Config, urls: Mapping[str, tuple[str, ...]]) -> Config:
    """Return the configuration with the addresses of the teachers in `urls`."""
    return cfg.model_copy(update={"teachers": cfg.teachers.at(urls)})
