"""The question of a data set that responses are sampled to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prompt:
    """One question of a data set."""

    id: str
    text: str
    """For people."""
    token_ids: Sequence[int]
    """For the engines: a tuple, and an array("q") in the request of an episode's turn."""
    label: str
    """For the reward function, as is the metadata."""
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Further columns of the row, JSON."""
    source: str = ""
    """Name of the source of data.train that has the row, or of its evaluation set; "" where
    data.train is one file."""
