"""Faults of a pair of engines: see table.py."""
