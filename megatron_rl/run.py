"""One training run: everything `train` holds in its hands, built in order and taken down in reverse.

Who does what: every rank trains; the leader of each data-parallel replica samples, scores and records its share of the
prompts; rank 0 starts the server, pushes weights and reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.batch.share import share_groups
from megatron_rl.config import Config, dump_config
from megatron_rl.data.prompts import PromptSource, load_prompts, load_tokenizer
from megatron_rl.engine.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from megatron_rl.engine.engine import Engine, OldPass
from megatron_rl.engine.parallel import Parallel, make_parallel
from megatron_rl.evaluate import evaluate
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.probe import PROMPTS_PER_REPLICA, SAMPLES_PER_PROMPT, shake_hands
from megatron_rl.records import Prompt, RolloutGroup, StepResult
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client import RolloutClient
from megatron_rl.rollout.handshake import auth_headers, check_server, server_info
from megatron_rl.rollout.recorder import Recorder
from megatron_rl.rollout.routed_experts import ModelSpec as ServedSpec
from megatron_rl.rollout.server import launch_server
from megatron_rl.weights.export import write_hf_checkpoint
from megatron_rl.weights.push import WeightPusher


@dataclass
class Leader:
    """What only the leader of a data-parallel replica has."""

    client: RolloutClient
    rewards: RewardPool
    recorder: Recorder


@dataclass
class Run:
    """See the module docstring.  Collective methods: sample, score (no), push, report, evaluate, save, finish."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    tokenizer: Any
    prompts: PromptSource
    eval_sets: dict[str, list[Prompt]]
    leader: Leader | None
    pusher: WeightPusher | None
    sinks: Sinks | None
    console: Console
    first_step: int = 0
    policy_version: int = 0
    sums: MetricSums = field(default_factory=MetricSums)
    seconds: dict[str, float] = field(default_factory=dict)
    step_started: float = field(default_factory=time.monotonic)
