"""The last pass rates of prompts, and the chance that an epoch draws a prompt by them
(data.sampling = "pass_rate").

A prompt whose responses all pass, or all fail, has advantages of 0 and teaches nothing.  With p the
share of responses that passed when the prompt was last sampled, an epoch draws it with the chance

    c(p) = c_0 + (1 - c_0) 4 p (1 - p),    c_0 = data.least_chance

which is 1 at p = 1/2 and for a prompt that was never sampled, and c_0 at p = 0 and p = 1.  The
factor 4 p (1 - p) is the variance of a reward of 0 or 1, relative to its largest value.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

import numpy as np

from megatron_rl.data.rows import DataError


class PassRates:
    """The pass rates of P prompts; NaN for a prompt that was not sampled yet."""

    def __init__(self, num_prompts: int, least_chance: float) -> None:
        self.least_chance = least_chance
        self.rates = np.full(num_prompts, np.nan, np.float32)
        """float32 [P]."""
        self._chances = np.ones(num_prompts)
        """float64 [P], c(p)."""
        self._text: str | None = None

    def chance(self, number: int) -> float:
        """Return the chance that an epoch draws the prompt."""
        return float(self._chances[number])

    def note(self, numbers: Sequence[int], passed: np.ndarray, scored: np.ndarray) -> None:
        """Replace the pass rates of these prompts; one without a scored response keeps its own.

        passed, scored: int [n].  Of a prompt that comes twice the later result counts.
        """
        for number, good, count in zip(numbers, passed.tolist(), scored.tolist(), strict=True):
            if count:
                self.rates[number] = good / count
                self._chances[number] = self._chance_of(self.rates[number])
                self._text = None

    def _chance_of(self, rates: np.ndarray) -> np.ndarray:
        rates = np.asarray(rates, np.float64)
        chances = self.least_chance + (1 - self.least_chance) * 4 * rates * (1 - rates)
        return np.where(np.isnan(chances), 1.0, chances)

    def to_text(self) -> str:
        """Return the rates for a checkpoint: float32, little-endian, compressed, in base64.

        A million prompts that were never sampled take 26 kB; made once until `note` changes a rate.
        """
        if self._text is None:
            packed = zlib.compress(self.rates.astype("<f4").tobytes(), 1)
            self._text = base64.b64encode(packed).decode("ascii")
        return self._text

    def load_text(self, text: str) -> None:
        """Read what `to_text` returned.  Raises DataError for another number of prompts."""
        try:
            rates = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<f4")
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(
                f"data order: the checkpoint's pass rates cannot be read ({error}); resume from"
                " another checkpoint"
            ) from error
        if len(rates) != len(self.rates):
            raise DataError(
                f"data order: the checkpoint has pass rates of {len(rates)} prompts, the data has"
                f" {len(self.rates)}; resume with the same data files"
            )
        self.rates = rates.astype(np.float32)
        self._chances = self._chance_of(self.rates)
        self._text = None

    def metrics(self) -> dict[str, float]:
        """Return data/sampled_prompts_frac, and data/draw_chance_mean over all prompts."""
        return {
            "data/sampled_prompts_frac": float((~np.isnan(self.rates)).mean()),
            "data/draw_chance_mean": float(self._chances.mean()),
        }
