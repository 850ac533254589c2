"""What every rank and server of a run does now: `megatron-rl top RUN`."""
