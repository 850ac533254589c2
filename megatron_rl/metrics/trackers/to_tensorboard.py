"""TensorBoard: event files in the run's folder.

A per-layer metric is one scalar per layer, and a histogram with one bin per layer, which shows the
profile over depth.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.trackers.tracker import COLUMNS, Row, TrackedRun, Tracker, cells


class TensorBoard(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        # purge_step hides the steps after the checkpoint that an earlier process wrote; these are
        # all its steps where it had no checkpoint
        self._board = SummaryWriter(
            str(RunFolder(run.folder).tensorboard), purge_step=run.first_step + 1
        )
        for name, content in (("run/config", run.config), ("run/versions", run.versions)):
            if content:
                self._board.add_text(
                    name, f"<pre>{html.escape(json.dumps(content, indent=1))}</pre>", 0
                )

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        for name, values in per_layer.items():
            for layer, value in enumerate(values):
                self._board.add_scalar(f"{name}/layer_{layer:02d}", value, step)
            self._draw_layers(name, values, step)

    def _draw_layers(self, name: str, values: Sequence[float], step: int) -> None:
        # one bin per layer, from -0.5 to 0.5 and so on, whose "count" is the value of the layer
        counts = [value if math.isfinite(value) else 0.0 for value in values]
        self._board.add_histogram_raw(
            name,
            min=-0.5,
            max=len(counts) - 0.5,
            num=sum(counts),
            sum=sum(layer * count for layer, count in enumerate(counts)),
            sum_squares=sum(layer**2 * count for layer, count in enumerate(counts)),
            bucket_limits=[layer + 0.5 for layer in range(len(counts))],
            bucket_counts=counts,
            global_step=step,
        )

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        for title, rows in tables.items():
            head = [f"| {' | '.join(names)} |" for names in (COLUMNS, ["---"] * len(COLUMNS))]
            self._board.add_text(
                f"samples/{title}", "\n".join([*head, *(line(cells(row)) for row in rows)]), step
            )

    def report(self, page: Path) -> None:
        from matplotlib.image import imread  # installed where there is a report, which needs it

        # [..., :3]: without the alpha channel of a PNG
        self._board.add_image(
            "report", imread(page.with_suffix(".png"))[..., :3], dataformats="HWC"
        )
        self._board.flush()

    def close(self, *, failed: bool) -> None:
        self._board.close()


def line(values: Sequence[object]) -> str:
    """Return a row of a Markdown table.

    The values are escaped, because they hold the texts of a model: an image in a text would be
    fetched.
    """
    shown = (
        "<br>".join(MARKS.sub(entity, html.escape(part)) for part in str(value).splitlines())
        for value in values
    )
    return f"| {' | '.join(shown)} |"


MARKS = re.compile(r"[|\\`*_\[\]]")
"""Characters with a meaning in Markdown within a row, beside HTML."""


def entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};"
