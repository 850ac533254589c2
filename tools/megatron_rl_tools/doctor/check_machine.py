"""Checks of this machine: system, memory, shared memory, process limits, host name, loopback,
GPUs.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_rl.config.versions import STACKS
from megatron_rl_tools.doctor.check import GIB, Check, fail_if, warn_if
from megatron_rl_tools.doctor.memory_limits import smallest_limit

LEAST_MEMORY_GIB = 6.0
"""Memory of the demo: two ranks and three server processes."""
LEAST_FILES, GOOD_FILES = 1024, 65536
"""Open files: sockets of requests and ranks, weight files, worker pipes."""
LEAST_PROCESSES = 4096
"""Processes and threads: torch and SGLang start dozens of threads in every process."""
INFINIBAND = Path("/sys/class/infiniband")


def check_machine() -> list[Check]:
    """Check everything of the machine except its GPUs."""
    memory = [check_memory(), check_shared_memory()]
    limits = [check_open_files(), check_processes(), check_locked_memory(), check_core_files()]
    network = [check_hostname(), check_loopback_port()]
    return [*check_platform(), *memory, *limits, *network, *check_tf32()]


def check_platform() -> list[Check]:
    system, version = platform.system(), f"{sys.version_info.major}.{sys.version_info.minor}"
    result = (
        f"{system} {platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    )
    linux = "SGLang and triton need Linux: use a container or a virtual machine"
    python = f"use Python {' or '.join(STACKS)}: make install PYTHON=python{next(iter(STACKS))}"
    return [
        fail_if(system != "Linux", "system", result, linux),
        fail_if(version not in STACKS, "python", platform.python_version(), python),
    ]


def check_memory() -> Check:
    """Check the free memory: that of the machine, or of the process's control group where that
    allows less.
    """
    memory = psutil.virtual_memory()
    free, total, where = memory.available, memory.total, ""
    limit = smallest_limit()
    if limit is not None and limit[0] < total:  # version 1 writes "no limit" as a huge number
        (total, left), where = limit, f", a limit of the container; the machine: {total / GIB:.1f}"
        free = max(0, min(free, left))
    result = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}{where}"
    remedy = f"the demo needs about {LEAST_MEMORY_GIB:g} GiB: stop other programs first"
    if where:
        remedy += ", or raise the limit (docker run --memory)"
    return warn_if(free < LEAST_MEMORY_GIB * GIB, "memory", result, remedy)


def check_shared_memory() -> Check:
    """Check /dev/shm, through which NCCL and worker processes exchange data; containers have 64 MB
    of it by default.
    """
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("WARN", "/dev/shm", str(error), "mount it: NCCL and SGLang use it")
    result = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f}"
    remedy = "nearly full: remove what killed programs left there (ls -la /dev/shm)"
    if usage.total < GIB:
        remedy = "too small for NCCL: start the container with --ipc=host or --shm-size=16g"
    return warn_if(usage.total < GIB or usage.free < GIB / 4, "/dev/shm", result, remedy)


# Limits of a process (ulimit) ---------------------------------------------------------------------


def limit(kind: int) -> tuple[float, str]:
    """Return (soft limit, as text); inf for no limit."""
    soft, hard = (
        math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)
    )
    now, most = ("unlimited" if value == math.inf else f"{value:,}" for value in (soft, hard))
    return soft, now if soft == hard else f"{now} (may be raised to {most})"


def check_open_files() -> Check:
    number, text = limit(resource.RLIMIT_NOFILE)
    name = "open files (ulimit -n)"
    remedy = f"ulimit -n {GOOD_FILES}; in a container: --ulimit nofile={GOOD_FILES}"
    if number < LEAST_FILES:
        return Check("FAIL", name, text, remedy)
    return warn_if(number < GOOD_FILES, name, text, f"few for many ranks: {remedy}")


def check_processes() -> Check:
    number, text = limit(resource.RLIMIT_NPROC)
    remedy = f"threads count, too: ulimit -u {LEAST_PROCESSES} or more"
    return warn_if(number < LEAST_PROCESSES, "processes (ulimit -u)", text, remedy)


def check_locked_memory() -> Check:
    """Check locked memory, as which RDMA and GPUDirect register their buffers."""
    number, text = limit(resource.RLIMIT_MEMLOCK)
    remedy = (
        "NCCL needs it for this machine's InfiniBand: ulimit -l unlimited; in a container: --ulimit"
        " memlock=-1"
    )
    return warn_if(
        number < math.inf and INFINIBAND.is_dir(), "locked memory (ulimit -l)", text, remedy
    )


def check_core_files() -> Check:
    """Check core files: a rank that dies with a large one delays its node for minutes, and may fill
    the disk.
    """
    number, text = limit(resource.RLIMIT_CORE)
    remedy = "a rank that crashes writes all its memory: ulimit -c 0, unless you need core files"
    return warn_if(number > GIB, "core files (ulimit -c)", text, remedy)


# Network and GPUs ---------------------------------------------------------------------------------


def check_hostname() -> Check:
    """Check the host's name: gloo binds to its address unless GLOO_SOCKET_IFNAME names an
    interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        known = psutil.net_if_addrs()
        usable = [
            name
            for name, addresses in known.items()
            if any(item.family in (socket.AF_INET, socket.AF_INET6) for item in addresses)
        ]
        wrong = [name for name in interface.split(",") if name not in usable]
        remedy = f"{', '.join(wrong)}: no interface with an address: use of {', '.join(usable)}"
        return fail_if(bool(wrong), "gloo interface", f"GLOO_SOCKET_IFNAME = {interface}", remedy)
    name = socket.gethostname()
    try:
        return Check("OK", "host name", f"{name} = {socket.gethostbyname(name)}")
    except OSError:
        remedy = "set GLOO_SOCKET_IFNAME (lo on a single machine)"
        return Check("WARN", "host name", f"{name} does not resolve", remedy)


def check_loopback_port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return Check("OK", "loopback", f"can listen (tried port {probe.getsockname()[1]})")
    except OSError as error:
        remedy = "the server and torchrun must be able to listen on 127.0.0.1"
        return Check("FAIL", "loopback", str(error), remedy)


def count_gpus() -> int:
    """Count the GPUs that this process may use, without torch: those of the driver, limited by
    CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [name for name in os.listdir("/dev") if name.startswith("nvidia")]
    installed = sum(name[6:].isdecimal() for name in devices)
    if visible is None:
        return installed
    return min(installed, sum(bool(index) for index in visible.split(",")))


def check_tf32() -> list[Check]:
    """Warn of each variable that makes NVIDIA's libraries compute float32 in TF32; NGC containers
    set the second.
    """
    remedy = (
        "float32 becomes TF32 in every process that does not turn it off, servers included: a"
        " trainer in float32 and verify-replay do; unset it where float32 servers start"
    )
    names = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    return [
        Check("WARN", "TF32", f"{name} = 1", remedy)
        for name in names
        if os.environ.get(name) == "1"
    ]


def check_visible_gpus(*, required: bool, building: bool) -> list[Check]:
    """Check the GPUs that torch sees.

    No GPU is a FAIL if one is `required` or the driver has one, but not while an image is built.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "make install, or repair the container's torch"
        return [Check("FAIL", "GPU", f"torch cannot be imported: {error}", remedy)]
    built_for = torch.version.cuda
    if not built_for and not building and (required or count_gpus() > 0):
        result = f"torch {torch.__version__} is a CPU build: it uses no GPU"
        remedy = (
            "install torch for CUDA (docs/install.md), or set run.device = cpu and hide the GPUs"
        )
        return [Check("FAIL", "GPU", result, remedy)]
    if not built_for:
        return [Check("OK", "GPU", "none: trains and serves on the CPU (run.device = auto or cpu)")]
    if not torch.cuda.is_available():
        result = f"none, but torch is built for CUDA {built_for}"
        if building:
            remedy = "as in every image build: run the doctor again where the image runs"
            return [Check("WARN", "GPU", result, remedy)]
        remedy = (
            "nvidia-smi shows the driver; in a container: --gpus all; CUDA_VISIBLE_DEVICES must not"
            " be empty"
        )
        if required or count_gpus() > 0:
            return [Check("FAIL", "GPU", result, remedy)]
        return [Check("WARN", "GPU", result, f"runs on the CPU; else: {remedy}")]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    remedy = "ranks wait for the slowest: use GPUs of one kind (CUDA_VISIBLE_DEVICES)"
    result = f"{count} x {', '.join(names)}, CUDA {built_for}"
    devices = warn_if(len(names) > 1, "GPU", result, remedy)
    return [devices, check_gpu_memory(count, torch.cuda.mem_get_info)]


def check_gpu_memory(count: int, free_and_total: Callable[[int], tuple[int, int]]) -> Check:
    """Check that no other program uses the GPUs; `free_and_total` returns bytes of one of them."""
    for index in range(count):
        free, total = free_and_total(index)
        if free < 0.9 * total:
            result = f"GPU {index}: {free / GIB:.1f} GiB free of {total / GIB:.1f}"
            remedy = "another program uses it: nvidia-smi names it"
            return Check("WARN", "GPU memory", result, remedy)
    return Check("OK", "GPU memory", "free")
