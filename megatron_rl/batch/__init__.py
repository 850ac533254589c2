"""Training batches from rollouts: advantages, mini-batch split, the packed order, exchange between
ranks.
"""
