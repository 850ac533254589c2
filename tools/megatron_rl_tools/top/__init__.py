"""`megatron-rl top RUN`: the current activity of every rank and server of a run."""
