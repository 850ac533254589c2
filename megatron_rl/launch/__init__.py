"""Starts and ends ranks: torchrun, watchdog, signals, exit codes."""
