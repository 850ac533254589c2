"""Process groups of a job (groups.py), megatron-core without CUDA (cpu.py) and without
TransformerEngine (without_te.py), float32 (tf32.py).

Importing this package first makes megatron-core work where these are not installed, and quiet.
"""

import warnings

from megatron_rl.distributed import cpu

# core warns on every import of each optional kernel that is not installed; `megatron-rl doctor`
# reports them
warnings.filterwarnings("ignore", message=r".*not installed\. Falling back to")
cpu.install_cpu()

# after the set-up: they import megatron-core
from megatron_rl.distributed.groups import (  # noqa: E402
    Parallel,
    device_of,
    from_rank_0,
    make_parallel,
)
from megatron_rl.distributed.tf32 import disable_tf32  # noqa: E402
from megatron_rl.distributed.without_te import choose_router_product  # noqa: E402

choose_router_product()

__all__ = ["Parallel", "device_of", "disable_tf32", "from_rank_0", "make_parallel"]
