"""The parts of tools/doctor.py: one module for each thing that is examined."""
