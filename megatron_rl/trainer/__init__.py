"""The run as objects: what train.py drives."""
