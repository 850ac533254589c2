"""Quantised checkpoints."""
