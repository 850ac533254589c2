"""The training engine: megatron-core model, passes, optimizer and checkpoints.

Importing any engine module first makes megatron-core work without CUDA where there is no GPU (see cpu.py).
"""

from megatron_rl.engine import cpu

cpu.install()
