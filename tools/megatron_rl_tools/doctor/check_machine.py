"""This machine: system, memory, shared memory, process limits, host name, loopback, GPUs."""

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

LEAST_MEMORY_GIB = 6.0  # the demo: two ranks and three server processes
LEAST_FILES, GOOD_FILES = 1024, 65536  # sockets of requests and ranks, weight files, worker pipes
LEAST_PROCESSES = 4096  # threads count: torch and SGLang start dozens in every process
INFINIBAND = Path("/sys/class/infiniband")


def check_machine() -> list[Check]:
    """All checks of the machine except its GPUs."""
    limits = [check_open_files(), check_processes(), check_locked_memory(), check_core_files()]
    network = [check_hostname(), check_loopback_port()]
    return [
        *check_platform(),
        check_memory(),
        check_shared_memory(),
        *limits,
        *network,
        *check_tf32(),
    ]


def check_platform() -> list[Check]:
    system, version = platform.system(), f"{sys.version_info.major}.{sys.version_info.minor}"
    found = (
        f"{system} {platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    )
    linux = "SGLang and triton need Linux: use a container or a virtual machine"
    python = f"use Python {' or '.join(STACKS)}: make install PYTHON=python{next(iter(STACKS))}"
    return [
        fail_if(system != "Linux", "system", found, linux),
        fail_if(version not in STACKS, "python", platform.python_version(), python),
    ]


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    remedy = f"the demo needs about {LEAST_MEMORY_GIB:g} GiB: stop other programs first"
    return warn_if(memory.available < LEAST_MEMORY_GIB * GIB, "memory", found, remedy)


def check_shared_memory() -> Check:
    """NCCL and worker processes exchange data through /dev/shm; containers have 64 MB of it by
    default.
    """
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("WARN", "/dev/shm", str(error), "mount it: NCCL and SGLang use it")
    found = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f}"
    remedy = "nearly full: remove what killed programs left there (ls -la /dev/shm)"
    if usage.total < GIB:
        remedy = "too small for NCCL: start the container with --ipc=host or --shm-size=16g"
    return warn_if(usage.total < GIB or usage.free < GIB / 4, "/dev/shm", found, remedy)


# Limits of a process (ulimit) ---------------------------------------------------------------------


def limit(kind: int) -> tuple[float, str]:
    """(soft limit, as text); inf for no limit."""
    soft, hard = (
        math.inf if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(kind)
    )
    now, most = ("unlimited" if each == math.inf else f"{each:,}" for each in (soft, hard))
    return soft, now if soft == hard else f"{now} (may be raised to {most})"


def check_open_files() -> Check:
    number, text = limit(resource.RLIMIT_NOFILE)
    name, remedy = (
        "open files (ulimit -n)",
        f"ulimit -n {GOOD_FILES}; in a container: --ulimit nofile={GOOD_FILES}",
    )
    if number < LEAST_FILES:
        return Check("FAIL", name, text, remedy)
    return warn_if(number < GOOD_FILES, name, text, f"few for many ranks: {remedy}")


def check_processes() -> Check:
    number, text = limit(resource.RLIMIT_NPROC)
    remedy = f"threads count, too: ulimit -u {LEAST_PROCESSES} or more"
    return warn_if(number < LEAST_PROCESSES, "processes (ulimit -u)", text, remedy)


def check_locked_memory() -> Check:
    """RDMA and GPUDirect register buffers as locked memory."""
    number, text = limit(resource.RLIMIT_MEMLOCK)
    remedy = (
        "NCCL needs it for this machine's InfiniBand: ulimit -l unlimited; in a container: --ulimit"
        " memlock=-1"
    )
    return warn_if(
        number < math.inf and INFINIBAND.is_dir(), "locked memory (ulimit -l)", text, remedy
    )


def check_core_files() -> Check:
    """A rank that dies with a large core file delays its node for minutes and may fill the disk."""
    number, text = limit(resource.RLIMIT_CORE)
    remedy = "a rank that crashes writes all its memory: ulimit -c 0, unless you need core files"
    return warn_if(number > GIB, "core files (ulimit -c)", text, remedy)


# Network and GPUs ---------------------------------------------------------------------------------


def check_hostname() -> Check:
    """gloo binds to the address that this host's name resolves to unless GLOO_SOCKET_IFNAME names
    an interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        known = psutil.net_if_addrs()
        remedy = f"no such interface: use one of {', '.join(known)}"
        return fail_if(
            interface not in known, "gloo interface", f"GLOO_SOCKET_IFNAME = {interface}", remedy
        )
    name = socket.gethostname()
    try:
        return Check("OK", "host name", f"{name} = {socket.gethostbyname(name)}")
    except OSError:
        return Check(
            "WARN",
            "host name",
            f"{name} does not resolve",
            "set GLOO_SOCKET_IFNAME (lo on a single machine)",
        )


def check_loopback_port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return Check("OK", "loopback", f"can listen (tried port {probe.getsockname()[1]})")
    except OSError as error:
        return Check(
            "FAIL",
            "loopback",
            str(error),
            "the server and torchrun must be able to listen on 127.0.0.1",
        )


def count_gpus() -> int:
    """GPUs that this process may use, without torch: those of the driver, limited by
    CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(
        [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]
    )
    return (
        found if visible is None else min(found, len([each for each in visible.split(",") if each]))
    )


def check_tf32() -> list[Check]:
    """A warning for each variable that makes NVIDIA's libraries compute float32 in TF32; NGC
    containers set the second.
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
    """What torch sees.

    No GPU is a FAIL if one is `required` or the driver has one, but not while an image is built.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "make install, or repair the container's torch"
        return [Check("FAIL", "GPU", f"torch cannot be imported: {error}", remedy)]
    built_for = torch.version.cuda
    if not built_for:
        return [Check("OK", "GPU", "none: trains and serves on the CPU (run.device = auto or cpu)")]
    if not torch.cuda.is_available():
        found = f"none, but torch is built for CUDA {built_for}"
        if building:
            return [
                Check(
                    "WARN",
                    "GPU",
                    found,
                    "as in every image build: run the doctor again where the image runs",
                )
            ]
        remedy = (
            "nvidia-smi shows the driver; in a container: --gpus all; CUDA_VISIBLE_DEVICES must not"
            " be empty"
        )
        if required or count_gpus() > 0:
            return [Check("FAIL", "GPU", found, remedy)]
        return [Check("WARN", "GPU", found, f"runs on the CPU; else: {remedy}")]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    remedy = "ranks wait for the slowest: use GPUs of one kind (CUDA_VISIBLE_DEVICES)"
    devices = warn_if(
        len(names) > 1, "GPU", f"{count} x {', '.join(names)}, CUDA {built_for}", remedy
    )
    return [devices, check_gpu_memory(count, torch.cuda.mem_get_info)]


def check_gpu_memory(count: int, free_and_total: Callable[[int], tuple[int, int]]) -> Check:
    """GPUs that another program uses; `free_and_total` returns bytes of one."""
    for index in range(count):
        free, total = free_and_total(index)
        if free < 0.9 * total:
            found = f"GPU {index}: {free / GIB:.1f} GiB free of {total / GIB:.1f}"
            return Check(
                "WARN", "GPU memory", found, "another program uses it: nvidia-smi names it"
            )
    return Check("OK", "GPU memory", "free")
