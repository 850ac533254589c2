"""Explain a mismatch between trainer and server: compute the same tokens with both, then remove one
difference after the other.
"""
