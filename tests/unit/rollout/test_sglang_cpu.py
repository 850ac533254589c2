"""SGLang on a machine without a GPU: with every work-around it imports; without any one of them it
does not.

When one of these tests fails after an SGLang upgrade, its work-around is no longer needed: remove
both.
"""

import importlib.util
import subprocess
import sys

import pytest
import torch

from megatron_rl.rollout.server import sglang_cpu

IMPORT_SGLANG = "import sglang.srt.managers.scheduler"
ALLOCATE = (
    "import torch; from sglang.srt.mem_cache.pool_host import common; "
    "from sglang.srt.state_capturer.base import BaseHostCache; "
    "BaseHostCache(4, 2, 2, name='routed_experts', device='cpu'); print('fine')"
)
CHECKSUM = (
    "import torch; from sglang.srt.utils.weight_checker import WeightChecker as W; w ="
    " W.__new__(W); w._get_model = lambda: torch.nn.Linear(2, 2); w._placement = dict(tp_rank=0,"
    " tp_size=1, dp_rank=0, dp_size=1, pp_rank=0, pp_size=1); w.handle('checksum', role='target');"
    " print('fine')"
)
PIN = (
    "import torch; from types import SimpleNamespace; from sglang.srt.lora.backend import"
    " torch_backend; from sglang.srt.model_executor.forward_batch_info import ForwardMode; batch ="
    " SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=1);"
    " torch_backend.TorchNativeLoRABackend(2, torch.device('cpu')).prepare_lora_batch(batch, [1],"
    " [0, 4], [0.0, 2.0], False); print('fine')"
)
FORK = (
    "import multiprocessing as mp; from sglang.srt.entrypoints import engine; assert engine.mp is"
    " mp; mp.set_start_method('spawn', force=True); assert mp.get_start_method() == 'fork';"
    " print('fine')"
)
IS_CPU = "from sglang.srt.utils import is_cpu; assert is_cpu()"

NEEDED = {
    "select_cpu_engine": (IS_CPU, "AssertionError"),
    "stub_sgl_kernel": (IMPORT_SGLANG, "sgl_kernel"),
    "stub_image_processor": ("import sglang.srt.configs", "AttributeError|ImportError"),
    "stub_torchvision": ("import sglang.srt.configs", "torchvision"),
    "allocate_without_pinning": (ALLOCATE, "Error"),
    "synchronize_nothing": (CHECKSUM, "AssertionError"),
    "pin_nothing": (PIN, "RuntimeError"),
    "fork_children": (FORK, "AssertionError"),
}

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the work-arounds are for machines without a GPU"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
    ),
]


def run(code: str, skip: str = "") -> subprocess.CompletedProcess[str]:
    prepare = (
        f"from megatron_rl.rollout.server import sglang_cpu; sglang_cpu.prepare(skip=({skip!r},))"
    )
    return subprocess.run(
        [sys.executable, "-c", f"{prepare}; {code}"], capture_output=True, text=True, timeout=120
    )


def test_every_work_around_has_a_test():
    assert [function.__name__ for function in sglang_cpu.WORK_AROUNDS] == list(NEEDED)


@pytest.mark.slow
def test_with_all_work_arounds_sglang_imports_and_allocates():
    result = run(f"{IS_CPU}; {IMPORT_SGLANG}; {ALLOCATE}; {CHECKSUM}; {PIN}; {FORK}")
    assert result.returncode == 0 and result.stdout.endswith("fine\n"), result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_without_the_work_around_sglang_fails(name):
    code, error = NEEDED[name]
    result = run(code, skip=name)
    assert result.returncode != 0, f"{name} is no longer needed"
    last = result.stderr.strip().splitlines()[-1]
    assert any(word in last for word in error.split("|")), last


def test_importing_the_module_changes_nothing():
    code = (
        "import sys; import megatron_rl.rollout.server.sglang_cpu; assert not {'torch', 'sglang',"
        " 'transformers', 'sgl_kernel', 'torchvision'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
