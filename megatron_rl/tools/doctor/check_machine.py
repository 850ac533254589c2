"""This machine: system, memory, shared memory, limits of a process, host name, loopback, GPUs."""

from __future__ import annotations

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
from megatron_rl.tools.doctor.check import GIB, Check

LEAST_MEMORY_GIB = 6.0  # the demo: two ranks and three server processes
LEAST_FILES, GOOD_FILES = 1024, 65536  # sockets of requests and ranks, weight files, worker pipes
LEAST_PROCESSES = 4096  # threads count: torch and SGLang start dozens in every process
INFINIBAND = Path("/sys/class/infiniband")


def check_machine() -> list[Check]:
    """All of it, but for GPUs."""
    limits = [check_open_files(), check_processes(), check_locked_memory(), check_core_files()]
    return [*check_platform(), check_memory(), check_shared_memory(), *limits, check_hostname(), check_loopback_port()]


def check_platform() -> list[Check]:
    found = f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    system = (
        Check("OK", "system", found)
        if platform.system() == "Linux"
        else Check("FAIL", "system", found, "SGLang and triton need Linux: use a container or a virtual machine")
    )
    if f"{sys.version_info.major}.{sys.version_info.minor}" in STACKS:
        python = Check("OK", "python", platform.python_version())
    else:
        remedy = f"use Python {' or '.join(STACKS)}: make install PYTHON=python{next(iter(STACKS))}"
        python = Check("FAIL", "python", platform.python_version(), remedy)
    return [system, python]


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available >= LEAST_MEMORY_GIB * GIB:
        return Check("OK", "memory", found)
    return Check("WARN", "memory", found, f"the demo wants about {LEAST_MEMORY_GIB:g} GiB: stop other programs first")


def check_shared_memory() -> Check:
    """NCCL and worker processes exchange data through /dev/shm; containers get 64 MB of it by default."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("WARN", "/dev/shm", str(error), "mount it: NCCL and SGLang use it")
    found = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f}"
    if usage.total < GIB:
        return Check(
            "WARN", "/dev/shm", found, "too small for NCCL: start the container with --ipc=host or --shm-size=16g"
        )
    if usage.free < GIB / 4:
        return Check("WARN", "/dev/shm", found, "nearly full: remove what killed programs left there (ls -la /dev/shm)")
    return Check("OK", "/dev/shm", found)


# Limits of a process (ulimit) ---------------------------------------------------------------------------------------


def limit(kind: int) -> tuple[float, str]:
    """(soft limit, as text); inf where there is none."""
    soft, hard = resource.getrlimit(kind)
    number = float("inf") if soft == resource.RLIM_INFINITY else float(soft)
    most = (
        "" if hard == soft else f" (may be raised to {'unlimited' if hard == resource.RLIM_INFINITY else f'{hard:,}'})"
    )
    return number, f"{'unlimited' if number == float('inf') else f'{soft:,}'}{most}"


def check_open_files() -> Check:
    number, text = limit(resource.RLIMIT_NOFILE)
    name, remedy = "open files (ulimit -n)", f"ulimit -n {GOOD_FILES}; in a container: --ulimit nofile={GOOD_FILES}"
    if number < LEAST_FILES:
        return Check("FAIL", name, text, remedy)
    return (
        Check("OK", name, text) if number >= GOOD_FILES else Check("WARN", name, text, f"few for many ranks: {remedy}")
    )


def check_processes() -> Check:
    number, text = limit(resource.RLIMIT_NPROC)
    if number < LEAST_PROCESSES:
        return Check("WARN", "processes (ulimit -u)", text, f"threads count, too: ulimit -u {LEAST_PROCESSES} or more")
    return Check("OK", "processes (ulimit -u)", text)


def check_locked_memory() -> Check:
    """RDMA and GPUDirect register buffers as locked memory."""
    number, text = limit(resource.RLIMIT_MEMLOCK)
    if number == float("inf") or not INFINIBAND.is_dir():
        return Check("OK", "locked memory (ulimit -l)", text)
    remedy = "this machine has InfiniBand, which NCCL cannot use so: ulimit -l unlimited; in a container: --ulimit memlock=-1"
    return Check("WARN", "locked memory (ulimit -l)", text, remedy)


def check_core_files() -> Check:
    """A rank that dies with a large core file holds up its node for minutes and may fill the disk."""
    number, text = limit(resource.RLIMIT_CORE)
    if number > GIB:
        remedy = "a rank that crashes writes all its memory: ulimit -c 0, unless you want that"
        return Check("WARN", "core files (ulimit -c)", text, remedy)
    return Check("OK", "core files (ulimit -c)", text)


# Network and GPUs ---------------------------------------------------------------------------------------------------


def check_hostname() -> Check:
    """gloo binds to the address that this host's name resolves to unless GLOO_SOCKET_IFNAME names an interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        found, known = f"GLOO_SOCKET_IFNAME = {interface}", psutil.net_if_addrs()
        if interface in known:
            return Check("OK", "gloo interface", found)
        return Check("FAIL", "gloo interface", f"{found}: no such interface", f"use one of {', '.join(known)}")
    name = socket.gethostname()
    try:
        return Check("OK", "host name", f"{name} = {socket.gethostbyname(name)}")
    except OSError:
        return Check("WARN", "host name", f"{name} does not resolve", "set GLOO_SOCKET_IFNAME (lo on a single machine)")


def check_loopback_port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return Check("OK", "loopback", f"can listen (tried port {probe.getsockname()[1]})")
    except OSError as error:
        return Check("FAIL", "loopback", str(error), "the server and torchrun must be able to listen on 127.0.0.1")


def count_gpus() -> int:
    """GPUs that this process may use, without torch: those the driver shows, less what CUDA_VISIBLE_DEVICES leaves out."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()])
    return found if visible is None else min(found, len([each for each in visible.split(",") if each]))


def check_gpus(*, wanted: bool, building: bool) -> list[Check]:
    """What torch sees.  None is a fault where one is `wanted` or the driver shows one, but not while an image is built."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [
            Check("FAIL", "GPU", f"torch cannot be imported: {error}", "make install, or repair the container's torch")
        ]
    built_for = torch.version.cuda
    if not built_for:
        return [Check("OK", "GPU", "none: trains and serves on the CPU (run.device = auto or cpu)")]
    if not torch.cuda.is_available():
        found = f"none, but torch is built for CUDA {built_for}"
        if building:
            return [Check("WARN", "GPU", found, "as in every image build: ask the doctor again where the image runs")]
        remedy = "nvidia-smi shows the driver; in a container: --gpus all; CUDA_VISIBLE_DEVICES must not be empty"
        is_fault = wanted or count_gpus() > 0
        return [
            Check(
                "FAIL" if is_fault else "WARN", "GPU", found, f"{'' if is_fault else 'runs on the CPU; else: '}{remedy}"
            )
        ]
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    found = f"{torch.cuda.device_count()} x {', '.join(names)}, CUDA {built_for}"
    alike = (
        Check("OK", "GPU", found)
        if len(names) == 1
        else Check("WARN", "GPU", found, "ranks wait for the slowest: use GPUs of one kind (CUDA_VISIBLE_DEVICES)")
    )
    return [alike, *check_gpu_memory(torch.cuda.device_count(), torch.cuda.mem_get_info)]


def check_gpu_memory(count: int, free_and_total: Callable[[int], tuple[int, int]]) -> list[Check]:
    """GPUs that another program uses; `free_and_total` gives bytes of one."""
    for index in range(count):
        free, total = free_and_total(index)
        if free < 0.9 * total:
            found = f"GPU {index}: {free / GIB:.1f} GiB free of {total / GIB:.1f}"
            return [Check("WARN", "GPU memory", found, "another program holds it: nvidia-smi names it")]
    return [Check("OK", "GPU memory", "free")]
