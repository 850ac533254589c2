"""megatron-rl gpu-check: what a first GPU must show, step by step, each in a process of its own
with a limit.
"""
