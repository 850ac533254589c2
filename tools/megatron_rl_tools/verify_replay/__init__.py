"""The parts of tools/megatron_rl_tools/verify_replay/verify_replay.py: what is given, what is
watched, what is compared, and what is broken on purpose."""
