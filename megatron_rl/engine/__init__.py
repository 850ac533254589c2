"""The training engine: megatron-core model, passes and optimizer."""

import megatron_rl.distributed  # noqa: F401  first: makes megatron-core work without CUDA, and quiet
