"""GPUs of the servers that a run starts: how many each one uses, and that none of them is a training rank's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config.rollout import RolloutConfig


def tensor_ranks(args: Sequence[str]) -> int:
    """The tensor parallel size in SGLang's options, 0 if there is none."""
    return option_value(args, "--tp-size", "--tensor-parallel-size", "--tp")


def model_copies(args: Sequence[str]) -> int:
    """GPUs of a server / its tensor parallel size: pipeline stages x data-parallel copies (DP attention needs no more GPUs)."""
    stages = option_value(args, "--pp-size", "--pipeline-parallel-size", "--pp") or 1
    copies = option_value(args, "--dp-size", "--data-parallel-size", "--dp") or 1
    return stages * (1 if "--enable-dp-attention" in args else copies)


def option_value(args: Sequence[str], *names: str) -> int:
    """The number that one of SGLang's options has, 0 if it is absent.  SGLang itself refuses what is not a number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*names, dest="value", nargs="?", default="", const="")
    value = parser.parse_known_args(list(args))[0].value
    return int(value) if value.isdecimal() else 0


def derived_tensor_ranks(rollout: RolloutConfig) -> int:
    """--tp-size that the run adds to server_args: all GPUs of rollout.gpus are used.  0: none is added."""
    each = len(rollout.gpus) // rollout.num_servers
    return 0 if tensor_ranks(rollout.server_args) else each // model_copies(rollout.server_args)


def check_sizes_of_servers(rollout: RolloutConfig) -> None:
    """Raise ValueError where server_args need another number of GPUs than rollout.gpus gives to a server."""
    each = len(rollout.gpus) // rollout.num_servers
    size, copies = tensor_ranks(rollout.server_args), model_copies(rollout.server_args)
    if not each or (size * copies == each if size else each % copies == 0):
        return
    needed = f"{size * copies}" if size else f"a multiple of {copies}"
    raise ValueError(
        f"server_args = {list(rollout.server_args)} need {needed} GPUs for a server, gpus = {list(rollout.gpus)} gives each of "
        f"num_servers = {rollout.num_servers} {each}: must be equal; change gpus or num_servers, or remove --tp-size, which "
        "the run then sets"
    )


def check_overlap(rollout: RolloutConfig, local_ranks: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError where a server that the run starts uses a GPU of the training ranks although weights are broadcast.

    local_ranks: training ranks on the host of rank 0; environ: theirs.  GPUs that CUDA_VISIBLE_DEVICES names by UUID cannot be
    compared with the numbers in rollout.gpus.
    """
    if rollout.urls or rollout.weight_sync != "distributed":
        return
    args = rollout.server_args
    first = option_value(args, "--base-gpu-id")
    last = first + (tensor_ranks(args) or 1) * model_copies(args)
    visible = [gpu for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if (gpu := each.strip())]
    visible = visible or [str(gpu) for gpu in range(max(local_ranks, last))]
    training = visible[:local_ranks]
    serving = [str(gpu) for gpu in rollout.gpus] or visible[first:last]
    if shared := [gpu for gpu in serving if gpu in training]:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)}: servers would use GPU {', '.join(shared)}, where training ranks run (they "
            f"have {', '.join(training)}), and rollout.weight_sync = distributed must not: NCCL refuses a GPU that two ranks "
            "share; set rollout.gpus to other GPUs than torchrun's CUDA_VISIBLE_DEVICES, rollout.weight_sync = colocated or "
            "disk, or rollout.urls"
        )
