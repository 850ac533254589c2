"""Ends a forked process at its n-th change to the disk, as a power cut or a full disk would.

A change is a write, fsync, rename, unlink, mkdir or rmdir by Python code (torch writes shards
through Python files).  Modes:
    exit     the change happens (of a write only the first half), then the process ends
    lost     the change does not happen, the process ends, and the power fails: see `Disk`
    full     from the n-th on every write fails with "No space left on device"
"""

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

MODES = ("exit", "lost", "full")
EXIT_CODE = 77
_open, _fsync = builtins.open, os.fsync


class Disk:
    """A model of what a power cut leaves of the folder `root`.

    fsync of a file makes its bytes durable, and not its name.  fsync of a folder makes its names
    durable, and nothing below it.  A power cut halves every file with bytes that are not durable.
    To make, rename or remove a file or a folder is one change of the folder that has the name.
    Any changes that are not durable may be lost, those of different names independently of one
    another; but no change of a name survives where an earlier change of that name is lost.
    """

    def __init__(self, root: Path) -> None:
        """Everything in `root` is durable now.  A second link keeps a file without a name."""
        self.root, self.inodes = root, root.with_name(f"{root.name}.inodes")
        self.names: dict[int, dict[str, int]] = {}
        """Inode of a folder -> its durable names and their inodes."""
        self.changes: list[tuple[int, dict[str, int | None]]] = []
        """Inode of a folder, and names in it with their new inodes; None: removed."""
        self.unsynced: set[int] = set()
        shutil.rmtree(self.inodes, ignore_errors=True)
        self.inodes.mkdir()
        for folder, _, files in os.walk(root):
            self.names[os.stat(folder).st_ino] = {
                name: inode_of(Path(folder, name)) for name in os.listdir(folder)
            }
            for name in files:
                self.link(Path(folder, name))

    def add_folder(self, path: Path | str) -> int:
        """Returns its inode, which stays open: no later folder gets the same one."""
        inode = os.fstat(os.open(path, os.O_RDONLY)).st_ino
        self.names.setdefault(inode, {})
        return inode

    def link(self, path: Path) -> int:
        """Returns the file's inode."""
        inode = inode_of(path)
        if not (link := self.inodes / str(inode)).exists():
            os.link(path, link)
        return inode

    def change(self, folder: int, names: dict[str, int | None]) -> None:
        self.changes.append((folder, names))

    def sync(self, inode: int) -> None:
        self.unsynced.discard(inode)
        for folder, names in self.changes:
            if folder == inode:
                self.names[folder] = changed(self.names[folder], names)
        self.changes = [change for change in self.changes if change[0] != inode]

    def write_state(self) -> None:
        """For the parent process."""
        with _open(self.inodes / "state", "w") as file:
            json.dump([list(self.names.items()), self.changes, list(self.unsynced)], file)

    def read_state(self) -> None:
        with _open(self.inodes / "state") as file:
            names, self.changes, unsynced = json.load(file)
        self.names, self.unsynced = dict(names), set(unsynced)

    def outcomes(self, most: int) -> Iterator[tuple[bool, ...]]:
        """Make `root` what a power cut may leave, once for each set of changes that survive.

        Yields the set.  Of more than `most` sets: none and all, all up to one, all but one, one.
        """
        count = len(self.changes)
        kept = (
            set(itertools.product([False, True], repeat=count))
            if 2**count <= most
            else extremes(count)
        )
        root = inode_of(self.root)
        for survived in sorted({self.consistent(each) for each in kept}):
            names = dict(self.names)
            for folder, change in itertools.compress(self.changes, survived):
                names[folder] = changed(names[folder], change)
            for path in self.root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.build(self.root, root, names)
            yield survived

    def consistent(self, kept: tuple[bool, ...]) -> tuple[bool, ...]:
        """Without the later changes of names of which an earlier one is lost."""
        lost: set[tuple[int, str]] = set()
        survived = []
        for (folder, change), is_kept in zip(self.changes, kept, strict=True):
            touched = {(folder, name) for name in change}
            survived.append(is_kept and not touched & lost)
            if not survived[-1]:
                lost |= touched
        return tuple(survived)

    def build(self, path: Path, inode: int, names: dict[int, dict[str, int]]) -> None:
        for name, entry in names[inode].items():
            if entry in names:
                (path / name).mkdir()
                self.build(path / name, entry, names)
            else:
                content = (self.inodes / str(entry)).read_bytes()
                (path / name).write_bytes(
                    content[: len(content) // 2] if entry in self.unsynced else content
                )


def inode_of(path: Path | str, *, within: int | None = None) -> int:
    return os.stat(path, dir_fd=within).st_ino


def changed(names: dict[str, int], change: dict[str, int | None]) -> dict[str, int]:
    return {name: inode for name, inode in (names | change).items() if inode is not None}


def extremes(count: int) -> set[tuple[bool, ...]]:
    numbers = range(count)
    alone = {tuple(number == other for other in numbers) for number in numbers}
    all_but_one = {tuple(number != other for other in numbers) for number in numbers}
    return (
        alone
        | all_but_one
        | {tuple(other < number for other in numbers) for number in range(count + 1)}
    )


class Crash:
    """install() in a forked process.  `at` counts from 1; 0 = never: then `count` is the number of
    points.

    root: the folder whose changes count; `Disk` makes another one beside it.
    """

    def __init__(self, at: int, mode: str, root: Path) -> None:
        self.at, self.mode, self.root = at, mode, str(root)
        self.count = 0
        self.disk = Disk(root)

    def install(self) -> None:
        for folder, _, _ in os.walk(self.root):
            self.disk.add_folder(folder)
        builtins.open = io.open = self.open
        os.fsync = self.fsync
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, self.counted(name, getattr(os, name)))

    def reached(self) -> bool:
        self.count += 1
        return self.count == self.at

    def die(self) -> None:
        self.disk.write_state()
        os._exit(EXIT_CODE)

    def outcomes(self, most: int = 64) -> Iterator[tuple[bool, ...]]:
        """In the parent, when the process has ended: Disk.outcomes; once without a power cut."""
        if self.mode != "lost":
            yield ()
            return
        self.disk.read_state()
        yield from self.disk.outcomes(most)

    def counted(self, name, real):
        def change(*args, **options):
            places = [
                os.path.split(os.fspath(path))
                for path in args[:2]
                if isinstance(path, str | os.PathLike)
            ]
            folders = {
                inode_of(folder or ".", within=options.get("dir_fd")) for folder, _ in places
            }
            if not folders & self.disk.names.keys():
                return real(*args, **options)
            (folder,) = folders  # a rename into another folder would be a change of two
            is_now = self.reached() and self.mode != "full"
            if is_now and self.mode == "lost":
                self.die()
            result = real(*args, **options)
            names = {name: None for _, name in places}
            if name in ("rename", "replace", "mkdir"):
                path = args[len(places) - 1]
                names[places[-1][1]] = (
                    self.disk.add_folder(path) if name == "mkdir" else inode_of(path)
                )
            self.disk.change(folder, names)
            if is_now:
                self.die()
            return result

        return change

    def fsync(self, descriptor):
        is_now = self.reached() and self.mode != "full"
        if is_now and self.mode == "lost":
            self.die()
        _fsync(descriptor)
        self.disk.sync(os.fstat(descriptor).st_ino)
        if is_now:
            self.die()

    def open(self, file, mode="r", *args, **options):
        is_ours = not isinstance(file, int) and os.path.abspath(os.fspath(file)).startswith(
            f"{self.root}/"
        )
        if not is_ours or not any(letter in mode for letter in "wax+"):
            return _open(file, mode, *args, **options)
        is_new = not os.path.exists(file)
        opened = _open(file, mode, *args, **options)
        inode = self.disk.link(Path(file))
        if is_new:
            folder, name = os.path.split(os.path.abspath(file))
            self.disk.change(inode_of(folder), {name: inode})
        return Writes(opened, inode, self)


class Writes:
    """A file whose writes count."""

    def __init__(self, file, inode: int, crash: Crash) -> None:
        self._file, self._inode, self._crash = file, inode, crash

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info):
        return self._file.__exit__(*exc_info)

    def write(self, data):
        crash = self._crash
        crash.disk.unsynced.add(self._inode)
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

    def writelines(self, lines):
        for line in lines:
            self.write(line)


def run_forked(work, crash: Crash | None = None, *, install: bool = True) -> int:
    """Exit status of `work()` in a forked process: 0 done, EXIT_CODE crashed as planned, 2 the disk
    was full, 1 raised.

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
            if crash is not None:
                crash.disk.write_state()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
