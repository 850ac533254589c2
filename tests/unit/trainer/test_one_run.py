"""A run of one rank from saved rollouts in this process; the same in other layouts: tests/dist/test_resume.py."""

import pytest

from tests.dist.test_resume import compare_runs
from tests.saved_run import make_material
