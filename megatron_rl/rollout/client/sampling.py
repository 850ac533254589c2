"""Settings of a sampling call, and requirements for the samples that servers return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from megatron_rl.config import Config
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.models.spec import ModelSizes


class SamplingSettings(TypedDict):
    """The fields of Sampling that a caller chooses; the client adds the weights' version."""

    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    id_prefix: NotRequired[str]
    single_turn: NotRequired[bool]
    truncation: NotRequired[Truncation | None]
    return_sets: NotRequired[bool]


def for_evaluation(
    cfg: Config, stop_token_ids: Sequence[int], id_prefix: str = ""
) -> SamplingSettings:
    """Return the settings of an evaluation's call."""
    return {
        "temperature": cfg.eval.temperature,
        "max_tokens": cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens,
        "stop_token_ids": stop_token_ids,
        "truncation": cfg.eval.truncation,
        "return_sets": False,
        "id_prefix": id_prefix,
    }


@dataclass(frozen=True)
class Sampling:
    """Settings that all requests of one call share."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    """Largest number of response tokens, a prefix included."""
    stop_token_ids: Sequence[int]
    """Tokens at which a response ends, beside the checkpoint's own end tokens."""
    policy_version: int
    """Version of the weights that the servers have.  They sample every token, unless newer weights
    arrive during the call."""
    run: str = ""
    """The run that sent these weights (weights/version.py)."""
    id_prefix: str = ""
    """The start of every rollout's id."""
    single_turn: bool = False
    """Sample one response per prompt, without agent.function."""
    first_row: int = 0
    """Routes of the rows before this one are known and not requested; 0: all are requested."""
    truncation: Truncation | None = None
    """Sample from kept sets; None: from all tokens, as the parity check does."""
    return_sets: bool = True
    """Return the kept sets, and log-probs over them.  Evaluation needs neither."""

    @property
    def wants_sets(self) -> bool:
        """Each sample comes with its kept sets."""
        return self.truncation is not None and self.return_sets


@dataclass(frozen=True)
class SampleRules:
    """Requirements for every sample of a run, the same in all requests."""

    spec: ModelSizes
    """Sizes of the model that the servers have."""
    want_routes: bool
    """A sample comes with the routes of its tokens."""
    drop_missing_routes: bool = False
    """A sample in which a row holds no route is dropped (replay.on_missing_route = drop_sample)."""
    by_adapter: bool = False
    """Requests name the adapter of their version (rollout.weight_sync = adapter), which samples all
    of their tokens, even if the servers get another meanwhile."""
