"""Rollouts become training batches: advantages, mini-batch split, the packed order, sharing inside a replica."""
