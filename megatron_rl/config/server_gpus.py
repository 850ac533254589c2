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


def servers_gpus(rollout: RolloutConfig, environ: Mapping[str, str], fewest: int = 0) -> list[tuple[str, ...]]:
    """The GPUs of each server that the run starts, as CUDA_VISIBLE_DEVICES names them; without rollout.gpus all take the first.

    fewest: GPUs that the host has at least, where the variable is unset.
    """
    args, num = rollout.server_args, rollout.num_servers
    if rollout.gpus:
        each = len(rollout.gpus) // num
        return [tuple(map(str, rollout.gpus[index * each : (index + 1) * each])) for index in range(num)]
    first = option_value(args, "--base-gpu-id")
    last = first + (tensor_ranks(args) or 1) * model_copies(args)
    return [tuple(visible_gpus(environ, max(fewest, last))[first:last])] * num


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, or the first `count` numbers where it is unset."""
    named = [gpu for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if (gpu := each.strip())]
    return named or [str(gpu) for gpu in range(count)]


def devices_of_server(rollout: RolloutConfig, index: int, environ: Mapping[str, str]) -> list[int]:
    """The GPUs of the server with this index, as a process with `environ` numbers them.  check_count has passed."""
    named = servers_gpus(rollout, environ)[index]
    visible = visible_gpus(environ, max((int(gpu) + 1 for gpu in named if gpu.isdecimal()), default=0))
    return [visible.index(gpu) for gpu in named]


def most_on_a_rank(rollout: RolloutConfig, local_ranks: int, environ: Mapping[str, str]) -> int:
    """How many servers of the run are on the same GPU as a training rank, at most; 0: none is."""
    if rollout.urls:
        return 0
    training = visible_gpus(environ, local_ranks)[:local_ranks]
    serving = [gpu for gpus in servers_gpus(rollout, environ, local_ranks) for gpu in gpus]
    return max(serving.count(gpu) for gpu in training)


def check_overlap(rollout: RolloutConfig, local_ranks: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError where a server that the run starts uses a GPU of the training ranks although weights are broadcast.

    local_ranks: training ranks on the host of rank 0; environ: theirs.  GPUs that CUDA_VISIBLE_DEVICES names by UUID cannot be
    compared with the numbers in rollout.gpus.
    """
    if rollout.urls or rollout.weight_sync != "distributed":
        return
    training = visible_gpus(environ, local_ranks)[:local_ranks]
    serving = [gpu for gpus in servers_gpus(rollout, environ, local_ranks) for gpu in gpus]
    if shared := [gpu for gpu in dict.fromkeys(serving) if gpu in training]:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)}: servers would use GPU {', '.join(shared)}, where training ranks run (they "
            f"have {', '.join(training)}), and rollout.weight_sync = distributed must not: NCCL refuses a GPU that two ranks "
            "share; set rollout.gpus to other GPUs than torchrun's CUDA_VISIBLE_DEVICES, rollout.weight_sync = colocated or "
            "disk, or rollout.urls"
        )
    if len(set(serving)) < len(serving):
        raise ValueError(
            f"rollout.num_servers = {rollout.num_servers} without rollout.gpus: all would use GPU "
            f"{', '.join(dict.fromkeys(serving))}, and NCCL refuses a GPU that two ranks share; set rollout.gpus"
        )


def check_count(rollout: RolloutConfig, host_gpus: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError for GPUs that the host does not have, or that rank 0 cannot send weights to."""
    if rollout.urls:
        return
    visible = visible_gpus(environ, host_gpus)
    needed = (option_value(rollout.server_args, "--base-gpu-id") if not rollout.gpus else 0) + (
        (tensor_ranks(rollout.server_args) or 1) * model_copies(rollout.server_args)
    )
    if not rollout.gpus and needed > len(visible):
        raise ValueError(
            f"rollout.server_args = {list(rollout.server_args)} need {needed} GPUs for a server, the host of rank 0 has "
            f"{len(visible)}: the run starts servers on that host only; start them yourself and set rollout.urls, or make them "
            "smaller"
        )
    if absent := [gpu for gpu in rollout.gpus if gpu >= host_gpus]:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)}: the host of rank 0 has GPUs 0 to {host_gpus - 1}, not "
            f"{', '.join(map(str, absent))}: the run starts servers on that host only; use fewer, or start servers on other "
            "hosts and set rollout.urls"
        )
    hidden = [str(gpu) for gpu in rollout.gpus if str(gpu) not in visible]
    if rollout.weight_sync == "colocated" and hidden:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)} with rollout.weight_sync = colocated: rank 0 sends weights through the "
            f"memory of these GPUs and does not see {', '.join(hidden)} (CUDA_VISIBLE_DEVICES = {','.join(visible)}); let it see "
            "these, or set weight_sync = distributed"
        )
