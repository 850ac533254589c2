"""Weights between HF checkpoints, megatron-core models and the inference servers."""
