"""What checkpoints are: families and their sizes, what fits on which ranks, what a token costs.

Imports no torch.
"""
