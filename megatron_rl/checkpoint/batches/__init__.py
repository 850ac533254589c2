"""Saved mini-batches, which `megatron-rl replay-batch` computes again.

bundle_header     bundle.json: why a mini-batch was saved, its layout, and what it gave
bundle_writer     writes a mini-batch with everything that its update is computed from
bundle            loads it into an engine of any layout
bundle_sequences  its sequences, whatever layout saved them
"""
