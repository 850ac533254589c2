"""Settings for all tests."""

import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.shapes import enforce_shapes

settings.register_profile("project", deadline=None)  # a busy machine is not a bug
settings.load_profile("project")
enforce_shapes()


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, as in a terminal: where tests are a shell's background job
    it would be ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def new_threads() -> Callable[[], set[threading.Thread]]:
    """Return a function that returns the running threads which this test has started; earlier
    tests may have left others.
    """
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before
