"""Turns rollouts into training batches: advantages, mini-batch split, the packed order, exchange
between ranks.
"""
