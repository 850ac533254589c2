"""Rollouts: SGLang servers, the client that samples from them, the experts they report, and the
record of it all.
"""
