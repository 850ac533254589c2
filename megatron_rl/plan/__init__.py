"""What a configuration will do before it does it: rank grid, parameters and bytes per rank.  Imports no torch."""
