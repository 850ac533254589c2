"""Conversion between HF checkpoints and Megatron's distributed checkpoints (torch_dist)."""
