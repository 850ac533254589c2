"""Ends a forked process at its n-th change to the disk, as a power cut or a full disk would.

A change is a write, fsync, rename, unlink, mkdir or rmdir by Python code (torch writes shards through Python files).  Modes:
    exit     the change happens (of a write only the first half), then the process ends
    lost     the change does not happen, and every file that was not synced loses half of its bytes
    full     from the n-th on every write fails with "No space left on device"
"""

import builtins
import errno
import io
import os
import sys
from pathlib import Path

MODES = ("exit", "lost", "full")
EXIT_CODE = 77
_open, _fsync = builtins.open, os.fsync


class Crash:
    """install() in a forked process.  `at` counts from 1; 0 = never: then `count` is the number of points."""

    def __init__(self, at: int, mode: str, root: Path) -> None:
        self.at, self.mode, self.root = at, mode, str(root)
        self.count = 0
        self.unsynced: set[str] = set()
        self.pipe = os.pipe()

    def install(self) -> None:
        builtins.open = io.open = self.open
        os.fsync = self.fsync
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, self.counted(name, getattr(os, name)))

    def reached(self) -> bool:
        self.count += 1
        return self.count == self.at

    def die(self) -> None:
        if self.mode == "lost":
            os.write(self.pipe[1], "\n".join(self.unsynced).encode())
        os._exit(EXIT_CODE)

    def lose(self) -> None:
        """In the parent, when the process has ended with all its threads: halve the files that were not synced."""
        os.close(self.pipe[1])
        with _open(self.pipe[0]) as names:
            for path in filter(os.path.exists, names.read().splitlines()):
                os.truncate(path, os.path.getsize(path) // 2)

    def counted(self, name, real):
        def change(*args, **options):
            is_now = self.reached() and self.mode != "full"
            if is_now and self.mode == "lost":
                self.die()
            result = real(*args, **options)
            if name in ("rename", "replace"):
                before, after = os.fspath(args[0]), os.fspath(args[1])
                self.unsynced = {
                    after + path[len(before) :] if path.startswith(before) else path for path in self.unsynced
                }
            if is_now:
                self.die()
            return result

        return change

    def fsync(self, descriptor):
        is_now = self.reached() and self.mode != "full"
        if is_now and self.mode == "lost":
            self.die()
        _fsync(descriptor)
        self.unsynced.discard(os.readlink(f"/proc/self/fd/{descriptor}"))
        if is_now:
            self.die()

    def open(self, file, mode="r", *args, **options):
        opened = _open(file, mode, *args, **options)
        is_ours = not isinstance(file, int) and os.path.abspath(os.fspath(file)).startswith(self.root)
        return Writes(opened, self) if is_ours and any(letter in mode for letter in "wax+") else opened


class Writes:
    """A file whose writes count."""

    def __init__(self, file, crash: Crash) -> None:
        self._file, self._crash = file, crash

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info):
        return self._file.__exit__(*exc_info)

    def write(self, data):
        crash = self._crash
        crash.unsynced.add(os.path.abspath(self._file.name))
        is_now = crash.reached()
        if crash.mode == "full" and crash.at and crash.count >= crash.at:
            raise OSError(errno.ENOSPC, "No space left on device", self._file.name)
        if is_now and crash.mode == "exit":
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            crash.die()
        if is_now:
            crash.die()
        return self._file.write(data)


def run_forked(work, crash: Crash | None = None, *, install: bool = True) -> int:
    """Exit status of `work()` in a forked process: 0 done, EXIT_CODE crashed as planned, 2 the disk was full, 1 raised.

    install: before `work`; else `work` does it.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if crash is not None and install:
                crash.install()
            work()
            status = 0
        except OSError as error:
            status = 2 if error.errno == errno.ENOSPC else 1
        except BaseException as error:
            if not str(error).count("No space left"):
                sys.excepthook(type(error), error, error.__traceback__)
            status = 2 if "No space left" in str(error) else 1
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if crash is not None:
        crash.lose()
    return status
