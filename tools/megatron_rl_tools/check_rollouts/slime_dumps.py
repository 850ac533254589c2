"""Debug dumps of slime and miles: --save-debug-rollout-data PATH or --dump-details DIR, one .pt
file per rollout step.

A file is torch.save of {"rollout_id": step, "samples": [fields of a Sample, ...]}, in miles also
"metadata".  Shapes are from slime 624b824 (slime/utils/types.py,
slime/observability/rollout_data_utils.py) and miles 31f1ca9 (miles/utils/types.py,
miles/ray/rollout/debug_data.py); field by field they are the same, but expert ids are a torch
tensor in slime and an array in miles.  Both keep the rows of dense layers: int32 [S - 1, layers of
the model, K].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron_rl_tools.check_rollouts.dumped import Finding
from megatron_rl_tools.check_rollouts.foreign import (
    ForeignRollout,
    make_record,
    or_zeros,
    without_dense,
    zero_layers,
)
from megatron_rl_tools.check_rollouts.model_sizes import Sizes
from megatron_rl_tools.check_rollouts.pt_files import load_tensors, to_numpy

MEDIA = ("mm_vision_num_patches", "mm_audio_num_tokens")
"""Fields of rollouts with media in miles, in which a media token stands for several rows."""
NEEDED = ("tokens", "response_length")


def is_miles(payload: Mapping[str, object]) -> bool:
    """Return whether miles wrote the dump: it writes "metadata" beside the samples, slime does not,
    and both write the fields of their Sample.
    """
    samples = payload.get("samples")
    first = samples[0] if isinstance(samples, list) and samples else None
    if not isinstance(first, dict):
        first = {}
    return "metadata" in payload or "rollout_indexer_topk" in first


def read_file(path: Path, findings: list[Finding], sizes: Sizes | None) -> Iterator[ForeignRollout]:
    """Yield the rollouts of a file, and add what is wrong with it to `findings`.

    Raises ValueError if it cannot be loaded.
    """
    payload = load_tensors(path)
    samples = payload.get("samples") if isinstance(payload, dict) else None
    if not isinstance(payload, dict) or not isinstance(samples, list):
        raise ValueError(f'{path}: no "samples": not a debug rollout dump of slime or miles')
    step = rollout_id(path, payload)
    places = [f"{path}, sample {index}" for index in range(len(samples))]
    routes = [routes_in(*pair) for pair in zip(samples, places, strict=True)]
    # one number for all rollouts: a layer that a server lost in one of them must stay visible
    dense = min((zero_layers(ids) for ids in routes if ids is not None and ids.size), default=0)
    for index, (sample, ids) in enumerate(zip(samples, routes, strict=True)):
        missing = [name for name in NEEDED if not isinstance(sample, dict) or name not in sample]
        if missing:
            where = f"step {step} {path.name}#{index}"
            text = f"the sample has no {missing}"
            findings.append(Finding("files", where, text, "another version of the trainer"))
            continue
        place = places[index]
        tokens = to_numpy(sample["tokens"], f"{place}: tokens", 1).astype(np.int64)
        length = int(to_numpy(sample["response_length"], f"{place}: response_length", 0))
        versions = numbers(sample.get("weight_versions"), place)
        logprobs = optional(sample, "rollout_log_probs", place, 1)
        yield ForeignRollout(
            make_record(path, index, step, tokens, length, versions),
            tokens,
            or_zeros(logprobs, length),
            routes=None if ids is None else without_dense(ids, sizes, dense),
            loss_mask=optional(sample, "loss_mask", place, 1),
            weight_versions=versions,
            has_logprobs=logprobs is not None,
            dense=dense if sizes is None else 0,
            has_media=has_media(sample),
        )


def rollout_id(path: Path, payload: Mapping[str, object]) -> int:
    """Return the rollout id of a file, from 0.  Raises ValueError if it is not a number."""
    step = payload.get("rollout_id")
    if isinstance(step, str) and re.fullmatch(r"\d+", step):
        step = int(step)
    if not isinstance(step, int):
        raise ValueError(f"{path}: rollout_id = {step!r}, must be a number")
    return step


def routes_in(sample: object, place: str) -> np.ndarray | None:
    """Return the routes of a sample, or None.

    A sample with media has None too: images and sound take several rows for one token.
    """
    if not isinstance(sample, dict) or has_media(sample):
        return None
    return optional(sample, "rollout_routed_experts", place)


def has_media(sample: Mapping[str, object]) -> bool:
    media = sample.get("multimodal_train_inputs")
    return isinstance(media, dict) and any(name in media for name in MEDIA)


def optional(
    sample: Mapping[str, object], name: str, place: str, dims: int | None = None
) -> np.ndarray | None:
    value = sample.get(name)
    return None if value is None else to_numpy(value, f"{place}: {name}", dims)


def numbers(versions: object, place: str) -> list[int]:
    """Return weight versions, which are text, as numbers.

    SGLang's version is "default" until the first weight sync, which has no order: then [].  Raises
    ValueError where they are no list.
    """
    if not isinstance(versions, list | None):
        raise ValueError(f"{place}: weight_versions must be a list, got {versions!r:.80}")
    texts = [str(version) for version in versions or ()]
    if not all(re.fullmatch(r"\d+", text) for text in texts):
        return []
    return [int(text) for text in texts]
