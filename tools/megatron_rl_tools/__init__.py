"""Commands beside the trainer: commands.py lists them, and each has a folder or a module."""

__version__ = "0.3.0"
