"""bundle.json of a saved mini-batch: why it was saved, its layout, and what its update gave.

A bundle is a folder with
    bundle.json                reason, step and update, layout, configuration, results
    replica_DDDDD.safetensors  data-parallel replica D: for each micro-batch its sequences,
                               advantages and rows
    rank_RRRRR.safetensors     rank R: its place; for each micro-batch log pi_old, log pi_ref and
                               flips of its rows, and the experts that R2 recorded; with
                               loss.router_shift the experts of the old-logprob pass and the
                               router's log-probabilities of them
    weights/                   HF checkpoint of the policy before the update, unless saved without
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

import torch

from megatron_rl.checkpoint.batches.bundle_sequences import BundleError
from megatron_rl.engine.engine import Engine

BUNDLE = "bundle.json"
VERSION = 1
OF_EACH_ROW = ("logprobs", "reference", "flips")
"""Values of OldPass with one number for each row, on the last pipeline stage."""
OF_ROUTERS = ("router_ids", "router_logprobs")
"""Values of OldPass.router, [l, t, K]."""


class OptionalKeys(TypedDict, total=False):
    """Keys of bundle.json that bundles of earlier versions lack."""

    policy_version: int | None
    """See MiniBatch.policy_version."""
    rollouts_of: str
    """The run whose saved rollouts were trained on (--from-rollouts); "" where servers sampled."""


class Header(OptionalKeys):
    """The content of bundle.json."""

    version: int
    reason: str
    step: int
    """Counted from 0."""
    update: int
    """Update of the step, counted from 0."""
    layout: str
    """Parallel sizes (all_ranks.layout_name)."""
    device: str
    """Name of the GPU, or "cpu"."""
    ranks: int
    replicas: int
    num_responses: int
    num_response_tokens: int
    loss: float | None
    grad_norm: float | None
    metrics: dict[str, float | None]
    """Metrics of the update; null where a value is not finite."""
    gradients: list[str]
    """Digest of each rank's gradients."""
    weights: str
    """The word "weights" where the bundle has them; else a text that says where they are."""
    config: dict[str, dict[str, object]]


def read_header(folder: Path) -> Header:
    """Read bundle.json.  Raises BundleError for a folder that is no bundle of this version."""
    file = folder / BUNDLE
    try:
        header: Header = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{folder}: not a saved mini-batch: {error}; name a folder of RUN/batches"
        ) from error
    if header.get("version") != VERSION:
        raise BundleError(
            f"{file}: version {header.get('version')}, must be {VERSION}; use the program that"
            " wrote it"
        )
    if missing := Header.__required_keys__ - header.keys():
        raise BundleError(
            f"{file}: keys are missing: {', '.join(sorted(missing))}; save the mini-batch again"
        )
    return header


def device_name(engine: Engine) -> str:
    """Return "cpu" or the GPU's name, as `Header.device` has it."""
    device = engine.parallel.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
