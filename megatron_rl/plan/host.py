"""Checks of the machine on which a run starts: room on its disk, free ports, and options that its
SGLang accepts.

Imports no torch.
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

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import grid, memory
from megatron_rl.plan.adam_bytes import adam_bytes
from megatron_rl.plan.hardware import GIB
from megatron_rl.rollout.server.ports import check_port_is_free
from megatron_rl.rollout.server.server_info import ServerError

PROBE = bytes(1 << 20)
"""Content of the file that is written to check a folder."""
LINE_TOKEN_BYTES = 16
"""Bytes per token of a line of rollouts: text, prompt and fields."""
SAVED_TOKEN_BYTES = 64
"""Bytes per token of both engines' saved tensors, without routes."""
PARSER_SECONDS = 120.0
"""Time limit of SGLang's parser."""
NOT_INSTALLED = 77
"""Exit status of PARSER where SGLang is not installed."""
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
    """Return the size of one checkpoint: what is trained, and Adam's state."""
    whole = cfg.model_copy(update={"parallel": ParallelConfig()})
    trained = memory.trained_parameters(spec, whole, 0).total
    return trained * (grid.element_size(cfg) + adam_bytes(cfg).saved)


def step_bytes(cfg: Config, spec: ModelSpec) -> int:
    """Return the largest size of one step's rollouts on the disk, where every response reaches its
    limit.
    """
    tokens = cfg.run.prompts_per_step * cfg.run.group_size
    tokens *= cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    routes = 2 * memory.host_route_bytes(spec, cfg, tokens)  # the server's and the trainer's
    # save_tensors: the fraction of the groups whose tensors are saved
    tensors = float(cfg.rollout.save_tensors) * (tokens * SAVED_TOKEN_BYTES + routes)
    return tokens * LINE_TOKEN_BYTES + int(tensors)


def disk_problems(cfg: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield why a checkpoint and the rollouts of a step cannot be written.

    Writes a file in the run's folder, or in the nearest one that exists, and removes it.
    """
    folder = cfg.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
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
            # a full disk or a quota may be reported only here
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
    """Yield the ports of this run's servers on which another program listens."""
    if cfg.rollout.urls or not cfg.rollout.port:
        return
    for port in range(cfg.rollout.port, cfg.rollout.port + cfg.rollout.num_servers):
        try:
            check_port_is_free(cfg.rollout.host, port)
        except ServerError as error:
            # other reasons, such as the address of another machine, may not hold where a run starts
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
                yield str(error)


def check_parsed_server_args(cfg: Config) -> list[str]:
    """Raise ValueError for rollout.server_args that the parser of the installed SGLang refuses.

    Returns a note where the parser could not be asked.
    """
    options = list(cfg.rollout.server_args)
    if not options or cfg.rollout.urls:  # importing SGLang takes seconds: only where it is needed
        return []
    name, python = f"rollout.server_args = {options}", str(cfg.rollout.python or sys.executable)
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [python, "-c", PARSER, *options],
            capture_output=True,
            text=True,
            timeout=PARSER_SECONDS,
            # without this variable SGLang takes its CUDA code paths, also where there is no GPU
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        )
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
