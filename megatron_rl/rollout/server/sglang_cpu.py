"""Start an unmodified SGLang server on a machine without a GPU:

    python -m megatron_rl.rollout.server.sglang_cpu OPTIONS

SGLang ships a CPU path, but importing it and capturing routed experts still use CUDA-only parts.
Each function of WORK_AROUNDS removes one obstacle; tests/unit/rollout/test_sglang_cpu.py fails as
soon as SGLang no longer needs one.  Needs SGLang >= 0.5.20 (0.5.21 tested).  Nothing is imported or
patched until this module is the main program.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Collection

TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def main(argv: list[str]) -> None:
    """Run the server in the foreground; `argv` are SGLang's own options."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def prepare(skip: Collection[str] = ()) -> None:
    """Apply every work-around whose function name is not in `skip`, in order."""
    for work_around in WORK_AROUNDS:
        if work_around.__name__ not in skip:
            work_around()


def select_cpu_engine() -> None:
    """Set the variable without which SGLang's is_cpu() is False on x86 and it takes the CUDA code
    paths.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def stub_sgl_kernel() -> None:
    """Stub the CUDA kernel wheel: speculative-decoding modules import names of it at module level,
    which no CPU code calls.
    """
    if importlib.util.find_spec("sgl_kernel") is not None:
        return

    def attribute(name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(
                f"sgl_kernel.{name} is a GPU kernel; this server runs on the CPU"
            )

        return missing

    stub_module("sgl_kernel", attribute).__dict__["__version__"] = "0"


def stub_image_processor() -> None:
    """Replace transformers' AutoImageProcessor where torchvision is missing: it is then a dummy
    whose every attribute raises, and SGLang registers vision processors with it at import.

    `import sglang` re-creates the transformers module, so it must come first.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    import sglang  # noqa: F401

    class AutoImageProcessor:
        @staticmethod
        def register(*args: object, **kwargs: object) -> None:
            """Do nothing: no vision model runs here."""

    sys.modules["transformers"].__dict__["AutoImageProcessor"] = AutoImageProcessor


def stub_torchvision() -> None:
    """Stub torchvision, which some vision configs import at module level.

    A real torchvision does not help: its wheel for another torch build breaks transformers in every
    process of the environment.  Runs after `stub_image_processor`, whose `import sglang` lets
    transformers see that torchvision is absent.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return

    def attribute(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in TORCHVISION_MODULES:
        stub_module(name, attribute)


def allocate_without_pinning() -> None:
    """Give the routed-experts capturer plain memory instead of a host buffer that it pins with
    cudaHostRegister.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(
        dims: tuple[int, ...], dtype: torch.dtype, device: str, **pinning: object
    ) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def synchronize_nothing() -> None:
    """Disable torch.cuda.synchronize: the checksums of /weights_checker call it on any device."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


def pin_nothing() -> None:
    """Ignore pin_memory: SGLang's layers with adapters, and their batches, ask for pinned memory on
    any device.
    """
    import torch

    if torch.cuda.is_available():
        return

    def without_pinning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
            return function(*args, **kwargs)

        return make

    for name in ("tensor", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010  typed


def fork_children() -> None:
    """Fork the scheduler and the detokenizer where SGLang asks for spawn.

    A spawned process imports torch and SGLang again: 29 s of CPU time for a server instead of 13 s,
    and 1,400 MiB of memory instead of 940 (results/server_start.json).  SGLang spawns because CUDA
    does not survive a fork; it sets the method while the process still has one thread.
    """
    import multiprocessing

    set_start_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = fork


WORK_AROUNDS: tuple[Callable[[], None], ...] = (
    select_cpu_engine,
    stub_sgl_kernel,
    stub_image_processor,
    stub_torchvision,
    allocate_without_pinning,
    synchronize_nothing,
    pin_nothing,
    fork_children,
)


def stub_module(name: str, attribute: Callable[[str], object]) -> types.ModuleType:
    """Put an importable package `name`, whose attributes `attribute` makes, into sys.modules and on
    its parent.
    """
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__dict__["__getattr__"] = attribute
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


# A process that SGLang spawns in spite of fork_children runs this module again, under the name
# __mp_main__, before its target is unpickled: it is prepared, too.
if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    main(sys.argv[1:])
