"""torch's CUDA allocator in a training rank.

The sizes of packed micro-batches change in every step.  Segments of fixed size then leave gaps that
no later tensor fits; segments that grow leave none (expandable_segments of torch's allocator).
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config import Config

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's names of the user's settings; releases before 2.9 read the second alone."""
GROWING = "expandable_segments:True"
KEEPS_ADDRESSES = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "nccl_ub")
"""Fields of core that it does not combine with growing segments (its own checks)."""


def reason_against(cfg: Config, environ: Mapping[str, str], *, has_servers: bool) -> str:
    """Return why a rank's segments must not grow, "" if they may."""
    for name in VARIABLES:
        if name in environ:
            return f"{name} = {environ[name]}, set by the user"
    if has_servers and cfg.rollout.weight_sync == "colocated":
        return "rollout.weight_sync = colocated shares memory with servers as CUDA-IPC handles"
    for name in KEEPS_ADDRESSES:
        if cfg.megatron.fields.get(name) not in (None, False, "none", "false"):
            return f"megatron.{name} keeps addresses of memory"
    return ""


def allocator_line(cfg: Config, environ: Mapping[str, str], *, has_servers: bool) -> str:
    """Return the line of the log and the dry run about the allocator of ranks on GPUs."""
    if reason := reason_against(cfg, environ, has_servers=has_servers):
        return f"torch's allocator as it is: {reason}"
    return f"torch's allocator: {GROWING}, as packed sizes change; {VARIABLES[1]} replaces it"


def grow_segments() -> None:
    """Let the segments of this process grow.  Call it before the process uses CUDA.

    A call, and no variable of the environment: servers that this process starts would inherit it,
    and their all-reduce shares memory as CUDA-IPC handles.
    """
    import torch  # here: the dry run needs none

    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:  # releases before 2.9
        change = torch.cuda.memory._set_allocator_settings
    change(GROWING)
