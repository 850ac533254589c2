"""What a configuration will do: checks, rank grid, parameters, bytes and seconds.

Imports no torch.
"""
