"""What is shown while the files of a checkpoint grow."""

import threading
from contextlib import contextmanager

import pytest

from megatron_rl.checkpoint import write_progress
from megatron_rl.checkpoint.write_progress import show_writing, size_of

MIB = 2**20


def test_the_bar_follows_the_sizes_of_all_files_and_ends_with_the_block(
    tmp_path, monkeypatch, new_threads
):
    monkeypatch.setattr(write_progress, "POLL_SECONDS", 0.001)
    shown, advanced, changed = [], [], threading.Event()

    @contextmanager
    def progress(text, total, unit):
        shown.append((text, total, unit))

        def advance(count):
            advanced.append(count)
            changed.set()

        yield advance

    def grow(name, size, expected):
        """Write the file, and wait until it was looked at and all of it was shown."""
        (tmp_path / name).write_bytes(bytes(size))
        seen = len(advanced) + 2
        while len(advanced) < seen or sum(advanced) < expected:
            assert changed.wait(10)
            changed.clear()

    files = [tmp_path / name for name in "ab"]
    with (
        pytest.raises(KeyError),
        show_writing(progress, "checkpoint of step 3", files, 5 * MIB + 7),
    ):
        assert len(new_threads()) == 1
        grow("a", 2 * MIB, 2)
        grow("b", 3 * MIB // 2, 3)
        grow("a", MIB, 3)  # a file that starts again takes nothing back
        grow("b", 3 * MIB, 4)
        raise KeyError
    assert (
        shown == [("checkpoint of step 3", 5, "MiB")] and sum(advanced) == 4 and min(advanced) == 0
    )
    assert not new_threads() and all(type(count) is int for count in advanced)
    assert size_of(tmp_path / "b") == 3 * MIB and size_of(tmp_path / "c") == 0
