"""GPUs of the servers that a run starts: their number, and that no training rank uses them.

`environ` is the environment of a process, for its CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megatron_rl.config.sections import RolloutConfig
from megatron_rl.config.sglang_settings import BY_NAME

MEM_FRACTION_STATIC = 0.8
"""SGLang's option of this name for servers on GPUs, as in examples/launch/serve.sh: the share of a
GPU's memory for weights and KV cache.

A weight sync allocates nccl's buffers and buckets beside it, when the server runs already.  SGLang
by itself leaves 10 GiB or more on large GPUs, but only 1.5 GiB where it sizes the KV cache after it
has captured graphs (arg_groups/memory_hook.py, 0.5.21); a server that runs out of memory ends.
"""


def mem_fraction(args: Sequence[str]) -> float | None:
    """Return the --mem-fraction-static in SGLang's options, None without one that is a number."""
    try:
        return float(option_text(args, "--mem-fraction-static"))
    except ValueError:
        return None


def tensor_ranks(args: Sequence[str]) -> int:
    """Return the tensor parallel size in SGLang's options, 0 if there is none."""
    return option_value(args, *BY_NAME["tp_size"].options)


def model_copies(args: Sequence[str]) -> int:
    """Return the number of GPUs of a server divided by its tensor parallel size: pipeline stages x
    data-parallel copies.
    """
    stages = option_value(args, *BY_NAME["pp_size"].options) or 1
    copies = option_value(args, *BY_NAME["dp_size"].options) or 1
    # under DP attention the copies share the tensor ranks
    return stages * (1 if "--enable-dp-attention" in args else copies)


def option_value(args: Sequence[str], *names: str) -> int:
    """Return the number that one of SGLang's options has, 0 if it is absent or not a number.

    SGLang itself refuses what is not a number.
    """
    value = option_text(args, *names)
    return int(value) if value.isdecimal() else 0


def option_text(args: Sequence[str], *names: str) -> str:
    """Return the value that one of SGLang's options has, "" if it is absent or has none."""
    # option and value may be one word or two; "?", as argparse ends the process where a value is
    # missing
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*names, dest="value", nargs="?", default="", const="")
    return parser.parse_known_args(list(args))[0].value


def derived_tensor_ranks(rollout: RolloutConfig) -> int:
    """Return the --tp-size that the run adds to server_args; 0 adds none."""
    size = len(rollout.gpus) // rollout.num_servers
    return 0 if tensor_ranks(rollout.server_args) else size // model_copies(rollout.server_args)


def check_sizes_of_servers(rollout: RolloutConfig) -> None:
    """Raise ValueError where server_args need another number of GPUs than a server has."""
    num_gpus = len(rollout.gpus) // rollout.num_servers
    size, copies = tensor_ranks(rollout.server_args), model_copies(rollout.server_args)
    if not num_gpus or (size * copies == num_gpus if size else num_gpus % copies == 0):
        return
    needed = f"{size * copies}" if size else f"a multiple of {copies}"
    raise ValueError(
        f"server_args = {list(rollout.server_args)} need {needed} GPUs for a server, gpus = "
        f"{list(rollout.gpus)} gives each of num_servers = {rollout.num_servers} {num_gpus}: must "
        "be equal; change gpus or num_servers, or remove --tp-size, which the run then sets"
    )


def servers_gpus(
    rollout: RolloutConfig, environ: Mapping[str, str], fewest: int = 0
) -> list[tuple[str, ...]]:
    """Return the GPUs of every server that the run starts, as CUDA_VISIBLE_DEVICES names them.

    Without rollout.gpus all servers take the first.  The host has at least `fewest` GPUs, which
    counts where the variable is unset.
    """
    args, num = rollout.server_args, rollout.num_servers
    if rollout.gpus:
        gpus, size = tuple(map(str, rollout.gpus)), len(rollout.gpus) // num
        return [gpus[index * size : (index + 1) * size] for index in range(num)]
    first = option_value(args, "--base-gpu-id")
    last = first + (tensor_ranks(args) or 1) * model_copies(args)
    return [tuple(visible_gpus(environ, max(fewest, last))[first:last])] * num


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES, or the first `count` numbers where it is unset."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [name for name in names if name] or [str(gpu) for gpu in range(count)]


def devices_of_server(rollout: RolloutConfig, index: int, environ: Mapping[str, str]) -> list[int]:
    """Return the GPUs of the server with this index, as a process with `environ` numbers them.

    Call check_count first: it reports GPUs that `environ` hides, which are a bare ValueError here.
    """
    gpus = servers_gpus(rollout, environ)[index]
    fewest = max((int(gpu) + 1 for gpu in gpus if gpu.isdecimal()), default=0)
    visible = visible_gpus(environ, fewest)
    return [visible.index(gpu) for gpu in gpus]


def most_on_a_rank(rollout: RolloutConfig, local_ranks: int, environ: Mapping[str, str]) -> int:
    """Return how many servers of the run, at most, are on the same GPU as a training rank."""
    if rollout.urls:
        return 0
    training = visible_gpus(environ, local_ranks)[:local_ranks]
    serving = [gpu for gpus in servers_gpus(rollout, environ, local_ranks) for gpu in gpus]
    return max(serving.count(gpu) for gpu in training)


def check_overlap(rollout: RolloutConfig, local_ranks: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError where weights are broadcast to a server on a GPU of a training rank.

    local_ranks: training ranks on the host of rank 0, which have `environ`.  GPUs that
    CUDA_VISIBLE_DEVICES names by UUID cannot be compared with the numbers in rollout.gpus.
    """
    if rollout.urls or rollout.weight_sync != "distributed":
        return
    training = visible_gpus(environ, local_ranks)[:local_ranks]
    serving = [gpu for gpus in servers_gpus(rollout, environ, local_ranks) for gpu in gpus]
    # a broadcast is an NCCL group of sending ranks and servers, with one rank per GPU
    if shared := [gpu for gpu in dict.fromkeys(serving) if gpu in training]:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)}: servers would use GPU {', '.join(shared)}, "
            f"where training ranks run (they have {', '.join(training)}), and rollout.weight_sync "
            "= distributed must not: NCCL refuses a GPU that two ranks share; set rollout.gpus to "
            "other GPUs than torchrun's CUDA_VISIBLE_DEVICES, rollout.weight_sync = colocated or "
            "disk, or rollout.urls"
        )
    if len(set(serving)) < len(serving):
        raise ValueError(
            f"rollout.num_servers = {rollout.num_servers} without rollout.gpus: all would use GPU "
            f"{', '.join(dict.fromkeys(serving))}, and NCCL refuses a GPU that two ranks share; "
            "set rollout.gpus"
        )


def check_count(rollout: RolloutConfig, host_gpus: int, environ: Mapping[str, str]) -> None:
    """Raise ValueError for GPUs that the host lacks, or that rank 0 cannot send weights to."""
    if rollout.urls:
        return
    visible = visible_gpus(environ, host_gpus)
    args = rollout.server_args
    size = (tensor_ranks(args) or 1) * model_copies(args)
    needed = option_value(args, "--base-gpu-id") + size
    if not rollout.gpus and needed > len(visible):
        raise ValueError(
            f"rollout.server_args = {list(args)} need {needed} GPUs for a server, "
            f"the host of rank 0 has {len(visible)}: the run starts servers on that host only; "
            "start them yourself and set rollout.urls, or make them smaller"
        )
    if absent := [gpu for gpu in rollout.gpus if gpu >= host_gpus]:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)}: the host of rank 0 has GPUs 0 to "
            f"{host_gpus - 1}, not {', '.join(map(str, absent))}: the run starts servers on that "
            "host only; use fewer, or start servers on other hosts and set rollout.urls"
        )
    # CUDA opens a handle of another process only on a visible GPU
    hidden = [str(gpu) for gpu in rollout.gpus if str(gpu) not in visible]
    if rollout.weight_sync == "colocated" and hidden:
        raise ValueError(
            f"rollout.gpus = {list(rollout.gpus)} with rollout.weight_sync = colocated: rank 0 "
            f"sends weights through the memory of these GPUs and does not see {', '.join(hidden)} "
            f"(CUDA_VISIBLE_DEVICES = {','.join(visible)}); let it see these, or set weight_sync = "
            "distributed"
        )
