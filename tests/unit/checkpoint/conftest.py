"""A folder in memory if possible: fsync of hundreds of saves is slow on a disk."""

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def memory():
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        yield Path(folder)
