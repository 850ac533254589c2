"""Checks of the machine on which a run starts: room on its disk, free ports, options that its
SGLang knows.  Imports no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import GIB
from megatron_rl.rollout.server.process import check_port_is_free
from megatron_rl.rollout.server.server_info import ServerError

PROBE = bytes(1 << 20)
TOKEN_BYTES = 16  # of a line of rollouts.jsonl: text, prompt and fields
SAVED_TOKEN_BYTES = 64  # of both engines' tensors, without routes
PARSER_SECONDS = 120.0
NOT_INSTALLED = 77
PARSER = f"""
import argparse, sys
from importlib.metadata import version
from importlib.util import find_spec
if find_spec("sglang") is None:
    sys.exit({NOT_INSTALLED})
print(version("sglang"), flush=True)
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang", usage=argparse.SUPPRESS)
ServerArgs.add_cli_args(parser)
parser.parse_args(["--model-path", "model", *sys.argv[1:]])
"""


def checkpoint_bytes(cfg: Config, spec: ModelSpec) -> int:
    """Size of one checkpoint: weights, Adam's two moments and, of 16-bit weights, their float32
    copy.
    """
    size = 2 if cfg.model.dtype == "bfloat16" else 4
    return memory.full_model(spec).total * (size + 8 + (4 if size == 2 else 0))


def step_bytes(cfg: Config, spec: ModelSpec) -> int:
    """Size of the rollouts of one step on the disk, at most: each response as long as its limit."""
    tokens = cfg.run.prompts_per_step * cfg.run.group_size
    tokens *= cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    routes = 2 * memory.host_route_bytes(spec, cfg, tokens)  # of the server and of the trainer
    return tokens * TOKEN_BYTES + int(
        float(cfg.rollout.save_tensors) * (tokens * SAVED_TOKEN_BYTES + routes)
    )


def disk_problems(cfg: Config, spec: ModelSpec) -> Iterator[str]:
    """Why a checkpoint and the rollouts of a step cannot be written.

    Writes a file there, and removes it.
    """
    folder = cfg.run_dir.absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    name = f"run.dir / run.name = {cfg.run_dir}"
    if not existing.is_dir():
        yield f"{name}: {existing} is a file; choose another run.dir or run.name"
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield f"{name}: {existing} is not writable; choose another run.dir"
        return
    free = shutil.disk_usage(existing).free
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".dry_run_") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield (
            f"{name}: no file can be written in {existing}: {error.strerror}, {free / GIB:.2f} GiB"
            " free; make room there, or choose another run.dir"
        )
        return
    checkpoint, step = checkpoint_bytes(cfg, spec), step_bytes(cfg, spec)
    if free < checkpoint + step:
        yield (
            f"{name}: {free / GIB:.2f} GiB free in {existing}, but a checkpoint takes"
            f" {checkpoint / GIB:.2f} GiB and the rollouts of a step at most {step / GIB:.2f} GiB;"
            " make room there, or choose another run.dir"
        )


def port_problems(cfg: Config) -> Iterator[str]:
    """The ports of the servers of this run that another program listens on."""
    if cfg.rollout.urls or not cfg.rollout.port:
        return
    for port in range(cfg.rollout.port, cfg.rollout.port + cfg.rollout.num_servers):
        try:
            check_port_is_free(cfg.rollout.host, port)
        except ServerError as error:
            # another reason, such as an address of another machine, is no fault of the
            # configuration
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
                yield str(error)


def check_parsed_server_args(cfg: Config) -> list[str]:
    """Raise ValueError for rollout.server_args that the installed SGLang's own parser refuses;
    returns why it was not asked.

    Its import takes seconds, so that it is asked only where there are such options.
    """
    options = list(cfg.rollout.server_args)
    if not options or cfg.rollout.urls:
        return []
    name, python = f"rollout.server_args = {options}", str(cfg.rollout.python or sys.executable)
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [python, "-c", PARSER, *options], capture_output=True, text=True,
            timeout=PARSER_SECONDS,
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        )  # fmt: skip
        errors = [line for line in done.stderr.splitlines() if line.startswith("sglang: error: ")]
        if done.returncode == 2 and errors:
            reason = errors[-1].removeprefix("sglang: error: ")
            version = done.stdout.partition("\n")[0]
            raise ValueError(
                f"{name}: SGLang {version}, of {python}, refuses it: {reason}; correct or remove it"
            )
        if done.returncode == 0:
            return []
        if done.returncode == NOT_INSTALLED:
            return [f"{name}: SGLang is not installed for {python}, so its parser was not asked"]
    return [f"{name}: the parser of SGLang of {python} could not be asked"]
