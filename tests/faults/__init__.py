"""Faults of rollout servers, made on purpose: the samples, the payloads, the trials and the table
of what became of them.
"""
