"""HF checkpoint <-> Megatron distributed checkpoint."""
