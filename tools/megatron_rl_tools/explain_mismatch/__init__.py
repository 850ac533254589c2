"""Explain a mismatch between trainer and server: the same tokens through both, then one difference
after the other removed.
"""
