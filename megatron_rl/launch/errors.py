"""Prints the error that ends a rank's run, in at most 15 lines.

The cause comes first and last, the user's frames in between.  The full traceback is in
logs/error_rankN.txt of the run directory.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import traceback
from pathlib import Path

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.log_lines import LogLines

PACKAGE = str(Path(__file__).resolve().parents[1])
MAX_FRAMES, MAX_CAUSE_LINES = 4, 5
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def report_error(
    error: BaseException,
    run_dir: Path,
    program: str = "megatron_rl.train",
    lines: LogLines | None = None,
) -> None:
    """Print the error of `program` and save its traceback.

    Frames are printed where the user's code, or a library, raised it.
    """
    log_lines = lines or LogLines()
    rank = os.environ.get("RANK", "0")
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    cause = (
        f"{program}: rank {rank}: {type(error).__name__}:"
        f" {error}{notes}{disk_advice(error, run_dir)}".splitlines()
    )
    shown = cause[:MAX_CAUSE_LINES] + (["  ..."] if len(cause) > MAX_CAUSE_LINES else [])
    path = write_traceback(error, RunFolder(run_dir).error(rank), log_lines)
    frames = shown_frames(error)
    if frames:
        shown += frames
        shown += [f"  full traceback: {path}"] if path is not None else []
        # the cause again, as the last line is the one that is read
        shown += cause[:1]
    log_lines.print_error(
        "\n".join(shown),
        rank=int(rank),
        error=type(error).__name__,
        traceback=None if path is None else str(path),
    )


def disk_advice(error: BaseException, run_dir: Path) -> str:
    """Name the file, the free space and the fix, where a disk refused to be written.

    Returns "" for every other error.
    """
    # some libraries keep only the text of the system's error
    is_full = os.strerror(errno.ENOSPC) in str(error)
    if getattr(error, "errno", None) not in DISK_ERRORS and not is_full:
        return ""
    file = getattr(error, "filename", None) or written_file(error, run_dir) or run_dir
    path = Path(file).absolute()
    # disk_usage needs a path that exists
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    return (
        f"; writing {path}: {free:.2f} GiB free there; make room (checkpoint.keep_last,"
        " rollout.save_tensors), or choose another run.dir, then continue with --resume"
    )


def written_file(error: BaseException, run_dir: Path) -> str | None:
    """Return the file that the code which raised the error was writing, from its local variables.

    The error of a full disk names no file.
    """
    # the innermost frame first: it was the one that wrote
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        values = [
            *frame.f_locals.values(),
            *getattr(frame.f_locals.get("self"), "__dict__", {}).values(),
        ]
        for value in values:
            if isinstance(value, io.IOBase) and str(getattr(value, "mode", "r"))[0] in "wax":
                return str(getattr(value, "name", ""))
            if (
                isinstance(value, Path)
                and value.suffix
                and value.absolute().is_relative_to(run_dir.absolute())
            ):
                return str(value)
    return None


def shown_frames(error: BaseException) -> list[str]:
    """Return the frame that raised, and the last ones in the user's files.

    Returns none where this package raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not is_ours(frame.filename) and not is_library(frame.filename)
    ]
    if not frames or (is_ours(frames[-1].filename) and not user_frames):
        return []
    chosen = [
        frame for frame in frames if frame in user_frames[-MAX_FRAMES + 1 :] or frame is frames[-1]
    ]
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in chosen]


def is_ours(filename: str) -> bool:
    return filename.startswith(PACKAGE)


def is_library(filename: str) -> bool:
    """Return True for installed packages, the standard library, and the launcher's frames."""
    return "site-packages" in filename or filename.startswith((sys.base_prefix, "<frozen"))


def write_traceback(error: BaseException, path: Path, lines: LogLines) -> Path | None:
    """Write the traceback and return its path, or None where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = lines.redactor.text("".join(traceback.format_exception(error)))
        # the name of a file that is not UTF-8 has no bytes in it
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    return path
