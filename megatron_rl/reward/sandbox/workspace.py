"""A shell and an editor for one episode, within the walls of box.py: the tools of a coding agent.

    with Workspace({"main.py": "print(1)"}) as workspace:
        turn = await session.generate(messages, tools=workspace.tools)
        answers = await session.call_tools(turn)

The directory is /box, in memory: a path that leads out of it, by a link too, reaches nothing of
this machine.  It ends with the workspace, as all processes do.  What goes wrong in a command or an
edit is text that the model reads; nothing of it ends the episode.

It imports the standard library alone, so that a program of another Python environment has it too.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

from megatron_rl.reward.sandbox.box import Box, Limits, SandboxError, end, find_box, module

logger = logging.getLogger(__name__)

LIMITS = Limits(seconds=3600.0, processes=16)
"""Limits of a workspace: `seconds` are of the CPU, for each process."""
COMMANDS = (
    "bash", "sh", "awk", "basename", "cat", "chmod", "cmp", "comm", "cp", "cut", "date", "diff",
    "dirname", "du", "echo", "env", "expr", "false", "find", "git", "grep", "head", "id", "ln",
    "ls", "mkdir", "mktemp", "mv", "nl", "od", "paste", "patch", "printf", "pwd", "realpath",
    "rm", "rmdir", "sed", "seq", "sleep", "sort", "stat", "tail", "tee", "test", "timeout",
    "touch", "tr", "true", "uniq", "wc", "xargs", "yes",
)  # fmt: skip
"""Commands of this machine that the shell has, beside Python without packages."""
START_SECONDS = 120.0
"""The limit for a start, on a busy machine."""
ANSWER_SECONDS = 15.0
"""The limit for an answer, above the seconds of a command, on a busy machine."""
MOST_ANSWER = 8 * 2**20
"""Bytes of an answer."""


OF_A_COMMAND: dict[str, type] = {
    "head": str, "tail": str, "left_out": int, "status": int, "is_late": bool, "is_too_long": bool,
}  # fmt: skip
"""Field of a command's answer -> its type."""


class WorkspaceError(Exception):
    """A request of a workspace failed; the text says why."""


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    head: str
    """The beginning of its output, standard error included."""
    tail: str
    """The end of its output, where that was longer than the beginning."""
    left_out: int
    """Bytes of its output between the two."""
    status: int
    """Exit status; -n where signal n killed it."""
    is_late: bool
    """It was stopped at the limit of seconds."""
    is_too_long: bool
    """It was stopped as it wrote more than 16 MiB."""

    @property
    def output(self) -> str:
        between = f"\n[{self.left_out} bytes left out]\n" if self.left_out else ""
        return f"{self.head}{between}{self.tail}"


class Workspace:
    """The directory of an episode, with a shell and an editor.

    Calls come from any thread, and follow one another.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        seconds: float = 10.0,
        output_bytes: int = 8_000,
        box: Box | None = None,
    ) -> None:
        """files: the first files, by path.  seconds, output_bytes: limits of a command; of a longer
        output the middle is left out.  box: default find_box(LIMITS, commands=COMMANDS).

        It starts with its first call, which raises SandboxError where it does not start, and
        ValueError where the files cannot be written.  Raises SandboxError where no sandbox works on
        this machine, ValueError for a path of `files` that leads out of the directory.
        """
        for path in files or {}:
            if os.path.isabs(path) or os.path.normpath(path).split("/")[0] in ("..", "."):
                raise ValueError(f"files: the path {path!r} must be one within the directory")
        self.box = box or find_box(LIMITS, commands=COMMANDS)
        self.files, self.seconds, self.output_bytes = dict(files or {}), seconds, output_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lost = ""
        """Why no call is answered any more."""
        self._lock = threading.Lock()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and the directory with them."""
        self._lost = self._lost or "the workspace is closed"
        if (process := self._process) is not None:
            process.kill()  # a call that waits for an answer reads its end
        with self._lock:
            self._end()

    @property
    def tools(self) -> list[Callable[..., str]]:
        """Return the tools of the model: functions from which their JSON schemas are made."""
        return [self.shell, self.view, self.create, self.replace]

    # The tools: what they return is for the model

    def shell(self, command: str) -> str:
        """Run a command of bash in the directory.

        Args:
            command: the command
        """
        try:
            ended = self.run(command)
        except WorkspaceError as error:
            return f"error: {error}"
        output, notes = ended.output, []
        if ended.is_late:
            notes.append(f"[stopped after {self.seconds:g} s]")
        elif ended.is_too_long:
            notes.append("[stopped, as it wrote too much]")
        elif ended.status:
            notes.append(f"[exit status {ended.status}]")
        if notes and output and not output.endswith("\n"):
            output += "\n"
        return output + "".join(notes)

    def view(self, path: str, first: int = 1, last: int = 0) -> str:
        """Show a file with the numbers of its lines.

        Args:
            path: the file
            first: its first line to show
            last: its last line to show, 0 for all
        """
        try:
            lines = self.read(path).split("\n")
        except WorkspaceError as error:
            return f"error: {error}"
        if lines[-1] == "":
            del lines[-1]
        end = last if 0 < last < len(lines) else len(lines)
        if not 1 <= first <= max(end, 1):
            return f"error: {path} has the lines 1 to {len(lines)}"
        text = "\n".join(f"{number}\t{lines[number - 1]}" for number in range(first, end + 1))
        if (left_out := len(text) - self.output_bytes) > 0:
            text = f"{text[: self.output_bytes]}\n[{left_out} characters left out]"
        return readable(text)

    def create(self, path: str, text: str) -> str:
        """Write a file, in the place of one that is there.

        Args:
            path: the file
            text: all of its text
        """
        return self._edited(path, lambda: text)

    def replace(self, path: str, old: str, new: str) -> str:
        """Replace text in a file, where it is there once.

        Args:
            path: the file
            old: the text to replace
            new: the text in its place
        """

        def replaced() -> str:
            text = self.read(path)
            if (count := text.count(old) if old else 0) != 1:
                raise WorkspaceError(
                    f"{path} has the old text {count} times, and must have it once"
                )
            return text.replace(old, new)

        return self._edited(path, replaced)

    def _edited(self, path: str, make: Callable[[], str]) -> str:
        try:
            self.write(path, make())
        except WorkspaceError as error:
            return f"error: {error}"
        return f"wrote {path}"

    # The same for programs

    def run(self, command: str) -> Ended:
        """Run a command.  Raises WorkspaceError where it cannot be started."""
        request = {"run": command, "seconds": self.seconds, "kept": self.output_bytes}
        return Ended(**self._ask(request, OF_A_COMMAND, self.seconds))

    def read(self, path: str) -> str:
        """Return the text of a file; bytes that are no UTF-8 are surrogates.

        Raises WorkspaceError for a path that is no file of the directory.
        """
        text: str = self._ask({"read": path}, {"text": str})["text"]
        return text

    def write(self, path: str, text: str) -> None:
        """Write a file, and the folders above it.  Raises WorkspaceError where that fails."""
        self._ask({"write": {path: text}}, {})

    def _ask(
        self, request: Mapping[str, object], fields: Mapping[str, type], seconds: float = 0.0
    ) -> dict[str, Any]:
        """Return these fields of the answer, which have these types.  Raises WorkspaceError."""
        with self._lock:
            if self._process is None and not self._lost:
                self._start()
            answer = self._exchange(request, seconds + ANSWER_SECONDS)
            if any(type(answer.get(name)) is not kind for name, kind in fields.items()):
                self._lose("its answer is none")
        return {name: answer[name] for name in fields}

    def _start(self) -> None:
        """Start it with its first files.  What goes wrong is not the model's fault, which no tool
        may tell it.
        """
        self._process = start(self.box)
        # also where it is not closed
        self._end = weakref.finalize(self, end, self._process)
        try:
            self._exchange({"write": self.files}, START_SECONDS)
        except WorkspaceError as error:
            if self._lost:
                raise SandboxError(f"a workspace did not start: {error}") from None
            self._end()
            self._lost = f"its first files could not be written: {error}"
            raise ValueError(f"files of a workspace: {error}") from None

    def _exchange(self, request: Mapping[str, object], seconds: float) -> dict[str, Any]:
        if self._lost:
            raise WorkspaceError(self._lost)
        assert self._process is not None
        deadline = time.monotonic() + seconds
        try:
            line = exchange_line(self._process, json.dumps(request).encode() + b"\n", deadline)
            answer = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            self._lose(str(error))
        if not isinstance(answer, dict):
            self._lose("its answer is none")
        if "error" in answer:
            raise WorkspaceError(str(answer["error"])[: self.output_bytes])
        return answer

    def _lose(self, why: str) -> NoReturn:
        """End the workspace, which a command may have destroyed."""
        self._end()
        if not self._lost:
            self._lost = f"the workspace has ended: {why}"
            logger.warning("%s; the model reads this as the answer of its tools", self._lost)
        raise WorkspaceError(self._lost)


def exchange_line(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Write a line, and return the line that answers it.

    Raises OSError where the process ends, TimeoutError at the deadline, ValueError for an answer
    that is too long.
    """
    assert process.stdin is not None and process.stdout is not None
    answer = bytearray()
    with selectors.DefaultSelector() as selector:
        for pipe, event in (
            (process.stdin, selectors.EVENT_WRITE),
            (process.stdout, selectors.EVENT_READ),
        ):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        while not answer.endswith(b"\n"):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("no answer in time")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    line = line[os.write(key.fd, line[:65_536]) :]
                    if not line:
                        selector.unregister(process.stdin)
                elif chunk := os.read(key.fd, 65_536):
                    answer += chunk
                else:
                    raise ConnectionError("its process is gone")
            if len(answer) > MOST_ANSWER:
                raise ValueError("its answer is too long")
    return bytes(answer)


def readable(text: str) -> str:
    """Return the text with a sign in the place of each byte that is no UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def start(box: Box) -> subprocess.Popen[bytes]:
    """Start the program of a workspace.

    From a thread that stays: the kernel ends the program with the thread that started it, and a
    tool is called in a thread of its own.
    """
    pipe = subprocess.PIPE
    program = partial(box.start, module("workspace"), stdin=pipe, stdout=pipe, is_first=True)
    return starter(os.getpid()).submit(program).result()


@cache
def starter(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts programs in the process `pid`: a fork does not have it."""
    return ThreadPoolExecutor(1, thread_name_prefix="workspaces")
