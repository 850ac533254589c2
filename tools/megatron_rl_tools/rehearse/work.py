"""A collective in progress, as torch hands it to the program."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import torch.distributed as dist

from megatron_rl_tools.rehearse.recorder import Recorder


class Work(dist.Work):
    """One call, of this index among those of its rank.

    finish: waits for the values that it brings and writes them; None if there are none.
    """

    def __init__(
        self,
        recorder: Recorder,
        pipe: Connection,
        index: int,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.recorder, self.pipe, self.index, self.finish = recorder, pipe, index, finish

    def wait(self, timeout: object = None) -> bool:
        self.recorder.events.append(("wait", self.recorder.phase, self.index))
        if self.finish is not None:
            finish, self.finish = self.finish, None
            self.pipe.send(self.index)  # the switchboard must know that this rank waits
            finish()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()
