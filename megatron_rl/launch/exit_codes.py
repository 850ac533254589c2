"""Exit statuses of a rank, which examples/launch/train.sh and slurm.sbatch pass on and act on."""

BAD_CONFIG = 2
"""Invalid configuration, or a model, data or function that it names cannot be loaded; a
restart would not help."""
REQUEUE = 85
"""Stopped by a signal, and saved where a step had been trained: a restart continues from there
(ERESTART of Linux)."""
STALLED = 87
"""The watchdog ended this rank and named the one that is dead, stopped, late or has failed."""
INTERRUPTED = 130
"""Ctrl-C."""
