"""The training engine: megatron-core model, passes and optimizer."""

# import it before megatron-core: it makes core work without CUDA, and without its log messages
import megatron_rl.distributed  # noqa: F401
