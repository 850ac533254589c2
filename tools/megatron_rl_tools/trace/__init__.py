"""Where one step of a run spent its time: `megatron-rl trace RUN`."""
