"""HF checkpoints: names, mapping to Megatron, files."""
