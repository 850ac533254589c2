"""Models: families and their sizes, the parallel sizes that fit them, and the cost of a token.

Imports no torch.
"""
