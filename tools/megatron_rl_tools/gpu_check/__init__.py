"""`megatron-rl gpu-check`: what a first GPU must show, in steps that are processes with a limit."""
