"""The servers of teachers whose checkpoints the run serves itself ([teachers.NAME] path)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from megatron_rl.config import Config
from megatron_rl.config.device_limits import Device
from megatron_rl.config.rules.teacher_servers import server_settings
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.rollout.server.process import Server, start_server
from megatron_rl.rollout.server.server_info import ServerError, tokenizer_digest


def checkpoint_problems(cfg: Config, vocab_size: int) -> Iterator[str]:
    """Yield why a teacher's checkpoint cannot be served, or cannot score the student's tokens."""
    for name, teacher in cfg.teachers.with_servers.items():
        if teacher.path is None:
            continue
        setting = f"teachers.{name}.path = {teacher.path}"
        try:
            theirs = json.loads((teacher.path / "config.json").read_text()).get("vocab_size")
        except (OSError, ValueError, AttributeError) as error:
            yield f"{setting}: cannot read config.json: {error}; give an HF checkpoint directory"
            continue
        if theirs is not None and theirs != vocab_size:
            yield (
                f"{setting} has vocab_size = {theirs}, the student {cfg.model.path} has"
                f" {vocab_size}: token ids would mean other text to it; choose a teacher with the"
                " student's tokenizer"
            )
        elif tokenizer_digest(teacher.path) != tokenizer_digest(cfg.model.path):
            yield (
                f"{setting} has other tokenizer files than the student {cfg.model.path}: token ids"
                " would mean other text to it; choose a teacher with the student's tokenizer"
            )


def start_teachers(
    cfg: Config, device: Device, stack: ExitStack, log: Callable[[str], None]
) -> dict[str, tuple[str, ...]]:
    """Start the servers, wait until every one answers, and return name -> addresses.

    They end with `stack`.  None is replaced: a teacher's server that dies ends the run, which then
    names the teacher.  Raises ServerError, and what start_server raises, with the teacher's name.
    """
    servers: dict[str, Server] = {}
    for name, teacher in cfg.teachers.with_servers.items():
        if teacher.path is None:
            continue
        path = RunFolder(cfg.run_dir).logs / f"teacher_{name}.log"
        path.unlink(missing_ok=True)  # of an earlier start of this run
        log(f"teacher {name}: starting an SGLang server of {teacher.path}, log in {path}")
        rollout = server_settings(teacher, cfg.rollout).model_copy(
            update={"start_timeout_seconds": cfg.start_seconds(device)}
        )
        try:
            servers[name] = stack.enter_context(
                start_server(
                    teacher.path, rollout, log_path=path, gpus=teacher.gpus, device=device, seed=0,
                    want_routes=False,
                )
            )  # fmt: skip
        except (ServerError, ValueError) as error:
            raise ServerError(f"teacher {name}: {error}") from error
    # all load their checkpoints at the same time
    for name, server in servers.items():
        try:
            server.wait_until_ready(log)
        except ServerError as error:
            raise ServerError(f"teacher {name}: {error}") from error
    return {name: (server.url,) for name, server in servers.items()}
