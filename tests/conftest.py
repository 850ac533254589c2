"""Settings for all tests."""

import signal

import pytest
from hypothesis import settings

from tests.shapes import enforce_shapes

settings.register_profile("project", deadline=None)  # a busy machine is not a bug
settings.load_profile("project")
enforce_shapes()

UNIT = ("reward", "rollout", "launch", "viewer", "test_evaluate.py")
TIMED = ("tests/e2e", *(f"tests/unit/{name}" for name in UNIT))
"""Tests that wait for other processes and servers.  Tests of numbers and layouts are never run again."""


def pytest_collection_modifyitems(config, items):
    """A test that waits for others is run once more if it fails, and listed as RERUN: then it, or the code, has a race."""
    for item in items:
        if item.path.is_relative_to(config.rootpath) and item.path.relative_to(config.rootpath).as_posix().startswith(
            TIMED
        ):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, as in a terminal: where tests are a shell's background job it would be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
