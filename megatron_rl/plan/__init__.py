"""Plans: checks of a configuration, its rank grid, parameters, bytes and seconds.

Imports no torch.
"""
