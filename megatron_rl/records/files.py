"""The files that a stage adds to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

Files = Mapping[str, Callable[[Path], None]]
"""File name -> function that writes it; a checkpoint may call it later, in a thread."""
