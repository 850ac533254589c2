"""Stable RL for large MoE language models: megatron-core training, SGLang rollouts, exact routing replay."""

__version__ = "0.1.0"
