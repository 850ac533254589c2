"""torch.cuda as a program sees it on a machine with GPUs, without a driver.

Streams are all the same one.  An event has always happened; waiting for it on the host is recorded.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from megatron_rl_tools.rehearse.recorder import Recorder

GPUS_PER_NODE = 8
PROPERTIES = dict(
    major=9, minor=0, name="pretended GPU", multi_processor_count=132, uuid="GPU-0",
    gcnArchName="", L2_cache_size=50 << 20, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448,
    shared_memory_per_block=49152,
)  # fmt: skip
"""Those of an H100, from NVIDIA's CUDA programming guide for version 9.0."""


def classes(recorder: Recorder) -> tuple[type, type]:
    """Return (Stream, Event); waiting for one on the host is recorded."""

    class Event:
        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def record(self, stream: object = None) -> None: ...
        def wait(self, stream: object = None) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, other: object) -> float:
            return 1.0

        def synchronize(self) -> None:
            recorder.sync("Event.synchronize")

    class Stream:
        device = torch.device("cuda", 0)
        cuda_stream = stream_id = device_index = 0

        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def wait_stream(self, stream: object) -> None: ...
        def wait_event(self, event: object) -> None: ...
        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            recorder.sync("Stream.synchronize")

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *args: object) -> None: ...

    return Stream, Event


def install(recorder: Recorder, total_bytes: int) -> None:
    """Replace the functions of torch.cuda that would ask the driver."""
    for name, function in functions(recorder, total_bytes).items():
        setattr(torch.cuda, name, function)
    torch.cuda.nvtx.range_push = lambda *args, **kwargs: None
    torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    torch.cuda.default_generators = (torch.default_generator,)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


def functions(recorder: Recorder, total_bytes: int) -> dict[str, Any]:
    """Return what replaces names of torch.cuda."""
    Stream, Event = classes(recorder)
    properties = types.SimpleNamespace(**PROPERTIES, total_memory=total_bytes)
    nothing = contextlib.nullcontext
    return dict(
        is_available=lambda: True,
        _is_compiled=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=lambda: GPUS_PER_NODE,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda *args: recorder.sync("cuda.synchronize"),
        current_stream=lambda *args: Stream(),
        default_stream=lambda *args: Stream(),
        Stream=Stream,
        Event=Event,
        ExternalStream=Stream,
        stream=lambda stream: nothing(),
        set_stream=lambda stream: None,
        device=lambda device: nothing(),
        get_rng_state=lambda *args, **kwargs: torch.default_generator.get_state(),
        set_rng_state=lambda *args, **kwargs: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_device_properties=lambda *args: properties,
        get_device_capability=lambda *args: (properties.major, properties.minor),
        get_device_name=lambda *args: properties.name,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        memory_allocated=lambda *args: recorder.live,
        memory_reserved=lambda *args: recorder.live,
        max_memory_allocated=lambda *args: recorder.peak,
        max_memory_reserved=lambda *args: recorder.peak,
        reset_peak_memory_stats=lambda *args: recorder.reset_peak(),
        mem_get_info=lambda *args: (total_bytes - recorder.live, total_bytes),
        memory_stats=lambda *args: {},
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
    )
