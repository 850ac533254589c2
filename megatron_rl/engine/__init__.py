"""The training engine: megatron-core model, passes, optimizer and checkpoints.

Importing any engine module first makes megatron-core work without CUDA where there is no GPU (see cpu.py).
"""

import warnings

from megatron_rl.engine import cpu

# core says on every import which optional kernels are absent; megatron_rl/tools/doctor/doctor.py is where a user asks for that
warnings.filterwarnings("ignore", message=r".*not installed\. Falling back to")
cpu.install()
