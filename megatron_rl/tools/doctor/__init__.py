"""The parts of megatron_rl/tools/doctor/doctor.py: one module for each thing that is examined."""
