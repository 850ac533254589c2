"""`megatron-rl trace RUN`: the time that a step of a run spent in its stages."""
