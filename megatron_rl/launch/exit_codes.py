"""Exit statuses of a rank, which examples/launch/train.sh and slurm.sbatch keep and act upon."""

BAD_CONFIG = 2
"""The configuration is refused; starting again would not help."""
REQUEUE = 85
"""Saved and stopped by a signal: start me again, I go on where I stopped (ERESTART of Linux)."""
STALLED = 87
"""The watchdog ended this rank: another is dead, stopped, late or has failed, and was named."""
INTERRUPTED = 130
"""Ctrl-C."""
