"""Settings for all tests."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.shapes import enforce_shapes

settings.register_profile("project", deadline=None)  # a busy machine is not a bug
settings.load_profile("project")
enforce_shapes()


SEVERAL_PROCESSES = [Path(__file__).parent / folder for folder in ("dist", "e2e", "te")]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that start ranks or servers run one after the other, in one of xdist's workers; the others beside them.

    Here, as xdist reads the marks before a conftest's pytest_collection_modifyitems.
    """
    if any(folder in item.path.parents for folder in SEVERAL_PROCESSES):
        item.add_marker(pytest.mark.xdist_group("several_processes"))


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, as in a terminal: where tests are a shell's background job it would be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
