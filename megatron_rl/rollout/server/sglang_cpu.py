"""Start an unmodified SGLang server on a machine without a GPU: python -m
megatron_rl.rollout.server.sglang_cpu OPTIONS

SGLang ships a CPU path, but importing it and capturing routed experts still touch CUDA-only pieces.
Each function of WORK_AROUNDS removes one obstacle; tests/unit/rollout/test_sglang_cpu.py fails as
soon as SGLang no longer needs one. Needs SGLang >= 0.5.20 (0.5.21 tested).  Nothing is imported or
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
    """Run the server in the foreground; the options are SGLang's own."""
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
    """Without this variable SGLang's is_cpu() is False on x86 and the CUDA code paths are taken."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def stub_sgl_kernel() -> None:
    """Speculative-decoding modules import names of the CUDA kernel wheel at module level; no CPU
    code calls them.
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
    """Without torchvision, transformers' AutoImageProcessor is a dummy whose every attribute
    raises; SGLang registers vision processors with it at import.  `import sglang` re-creates the
    transformers module, so it must come first."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    import sglang  # noqa: F401

    class AutoImageProcessor:
        @staticmethod
        def register(*args: object, **kwargs: object) -> None:
            """No vision model runs here."""

    sys.modules["transformers"].__dict__["AutoImageProcessor"] = AutoImageProcessor


def stub_torchvision() -> None:
    """Some vision configs import torchvision at module level.  A real torchvision does not help:
    its wheel for another torch build breaks transformers in every process of the environment.

    Runs after `stub_image_processor`, whose `import sglang` lets transformers see that torchvision
    is absent.
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
    """The routed-experts capturer pins its host buffer with cudaHostRegister; without CUDA plain
    memory is right.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(
        dims: tuple[int, ...], dtype: torch.dtype, device: str, **pinning: object
    ) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def synchronize_nothing() -> None:
    """The checksums of /weights_checker wait for CUDA before and after, on any device."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


WORK_AROUNDS: tuple[Callable[[], None], ...] = (
    select_cpu_engine,
    stub_sgl_kernel,
    stub_image_processor,
    stub_torchvision,
    allocate_without_pinning,
    synchronize_nothing,
)


def stub_module(name: str, attribute: Callable[[str], object]) -> types.ModuleType:
    """Put an importable package `name` into sys.modules (and on its parent) whose attributes come
    from `attribute`.
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


# SGLang spawns its scheduler and detokenizer; spawn runs this module again under the name
# __mp_main__ before the child's target is unpickled, so the children are prepared too.
if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    main(sys.argv[1:])
