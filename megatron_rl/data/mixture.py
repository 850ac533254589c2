"""The order of prompts of several sources ([[data.train]]), which are mixed by weight.

Draw i of source s has the time (i + u_si) / w_s: w_s is the source's weight, and u_si, in [0, 1),
is a hash of run.seed, the source's name and i (1/2 with data.shuffle = false).  Draws are made in
the order of their times.  Before the time t a source is drawn floor(w_s t) or ceil(w_s t) times, so
over sum(w_s) draws of integer weights exactly w_s times, and neither a resume nor the number of
replicas changes that.  The hash keeps a source from always meeting the same replica, which takes
every D-th prompt.

Within a source the order is that of a file: every prompt once per epoch.
"""

from __future__ import annotations

import copy
import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rl.config.exact import as_written
from megatron_rl.data.pass_rates import PassRates
from megatron_rl.data.prompt_stream import PromptState, PromptStream
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.rows import DataError
from megatron_rl.records import Prompt

HASH_BITS = 32
RESUME = "resume with the same tables [[data.train]], or use a new run directory"


@dataclass(frozen=True)
class Part:
    """One source of a mixture."""

    name: str
    prompts: Sequence[Prompt]
    weight: float
    when_used_up: Literal["repeat", "stop", "drop"]


class MixedPrompts(PromptStream):
    """An order over the prompts of several sources."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        seed: int,
        shuffle: bool,
        least_chance: float | None = None,
    ) -> None:
        """least_chance: data.least_chance with data.sampling = pass_rate, else None."""
        super().__init__([prompt for part in parts for prompt in part.prompts])
        self.parts, self.seed, self.shuffle = parts, seed, shuffle
        self.sources = [
            PromptSource(
                part.prompts,
                seed=seed,
                shuffle=shuffle,
                rates=None if least_chance is None else PassRates(len(part.prompts), least_chance),
                # sources of one size must not have one order
                key=[zlib.crc32(part.name.encode())],
                repeats=part.when_used_up == "repeat",
            )
            for part in parts
        ]
        # times as integers, which do not round: (i 2^32 + hash) / w_s, times what makes it whole
        weights = [as_written(part.weight) for part in parts]
        scale = math.lcm(*(weight.numerator for weight in weights))
        self._periods = [int(scale / weight) for weight in weights]
        self.drawn = [0] * len(parts)
        """Number of draws of each source."""
        self._times = [self._time(index) for index in range(len(parts))]

    def _time(self, index: int) -> int:
        """Return the time of the source's next draw."""
        count = self.drawn[index]
        fraction = 1 << (HASH_BITS - 1)
        if self.shuffle:
            text = f"{self.seed}\0{self.parts[index].name}\0{count}"
            digest = hashlib.blake2b(text.encode(), digest_size=HASH_BITS // 8).digest()
            fraction = int.from_bytes(digest, "little")
        return ((count << HASH_BITS) + fraction) * self._periods[index]

    @property
    def is_endless(self) -> bool:
        # a dropped source is passed over, one that stops ends the mixture
        stops = any(part.when_used_up == "stop" for part in self.parts)
        return not stops and any(source.is_endless for source in self.sources)

    def _next(self) -> Prompt | None:
        # a dropped source is asked again and again: it is used up, which costs nothing
        for index in sorted(range(len(self.parts)), key=self._times.__getitem__):
            prompt = self.sources[index]._next()
            if prompt is not None:
                self.drawn[index] += 1
                self._times[index] = self._time(index)
                return prompt
            if self.parts[index].when_used_up == "stop":
                return None
        return None

    def _copy(self) -> MixedPrompts:
        ahead = copy.copy(self)
        ahead.sources = [copy.copy(source) for source in self.sources]
        ahead.drawn, ahead._times = list(self.drawn), list(self._times)
        return ahead

    def note(self, prompts: Sequence[Prompt], passed: np.ndarray, scored: np.ndarray) -> None:
        for part, source in zip(self.parts, self.sources, strict=True):
            rows = [row for row, prompt in enumerate(prompts) if prompt.source == part.name]
            source.note([prompts[row] for row in rows], passed[rows], scored[rows])

    def state_dict(self, first: Sequence[Prompt] = ()) -> PromptState:
        sources = [
            {
                "name": part.name,
                "weight": part.weight,
                "when_used_up": part.when_used_up,
                "drawn": drawn,
                **source.state_dict(),
            }
            for part, source, drawn in zip(self.parts, self.sources, self.drawn, strict=True)
        ]
        return {"sources": sources, "returned": self.numbers([*first, *self.returned])}

    def load_state_dict(self, state: PromptState) -> None:
        """Continue from `state`.

        Raises DataError where it was made with other sources, weights, prompts or seed.
        """
        if "sources" not in state:
            raise DataError(
                f"data order: data.train has {len(self.parts)} sources, the checkpoint was made"
                " with one file; resume with data.train = FILE, or use a new run directory"
            )
        before, now = [[saved["name"] for saved in state["sources"]], [p.name for p in self.parts]]
        if before != now:
            raise DataError(
                f"data order: data.train has the sources {now}, the checkpoint was made with"
                f" {before}; {RESUME}"
            )
        for part, source, saved in zip(self.parts, self.sources, state["sources"], strict=True):
            for key in ("weight", "when_used_up"):
                if getattr(part, key) != saved[key]:
                    raise DataError(
                        f"data order: source {part.name}: {key} = {getattr(part, key)}, the"
                        f" checkpoint was made with {saved[key]}; {RESUME}"
                    )
            try:
                source.load_state_dict(saved)
            except DataError as error:
                raise DataError(f"source {part.name}: {error}") from error
        self.drawn = [saved["drawn"] for saved in state["sources"]]
        self._times = [self._time(index) for index in range(len(self.parts))]
        self.returned = [self.prompts[number] for number in state["returned"]]

    def place(self) -> str:
        places = [
            f"{part.name}: {source.place()}"
            for part, source in zip(self.parts, self.sources, strict=True)
        ]
        return "; ".join(places)

    def metrics(self) -> dict[str, float]:
        metrics = {
            f"source/{part.name}/epochs": source.epoch + source.position / len(part.prompts)
            for part, source in zip(self.parts, self.sources, strict=True)
        }
        for part, source in zip(self.parts, self.sources, strict=True):
            for name, value in source.metrics().items():
                metrics[f"source/{part.name}/{name.removeprefix('data/')}"] = value
        return metrics
