"""The training engine: megatron-core model, passes and optimizer."""

# first: makes megatron-core work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401
