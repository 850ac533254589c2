"""megatron-rl doctor: one module for each subject of its checks."""
