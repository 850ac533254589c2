"""The weights that a push sends: names, shapes and dtypes, taken from the servers' checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.export import HFTensor
from megatron_rl.weights.hf.files import DTYPES, is_left_out, outline, read_headers
from megatron_rl.weights.hf.rules import ONE_CALL
from megatron_rl.weights.hf.targets import adapted
from megatron_rl.weights.sync.servers import WeightPushError

Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> (shape, dtype to send)."""


SELECTION_BIAS = "e_score_correction_bias"
"""The end of the names of expert-selection biases (WeightRule.float32)."""


@dataclass(frozen=True)
class PushedWeights:
    """The weights of the servers' model, as every push sends them."""

    checkpoint: Path
    """HF directory that the servers were started on.  Every push must have its names, shapes and
    stored dtypes: SGLang skips an unknown name, and keeps the old tensor of a missing one, without
    an error."""
    dtype: torch.dtype
    """Dtype that the servers run in.  Tensors that the checkpoint stores in another dtype than most
    keep theirs."""
    fp8_keep: Sequence[str] | None = None
    """None: weights are not rounded.  Else they are rounded to FP8 and back, except names that
    match one of these patterns.
    """
    changing: frozenset[str] | None = None
    """HF names of the tensors that training changes (adapted_tensors); None: all of them."""


def adapted_tensors(checkpoint: Path, targets: Iterable[str]) -> frozenset[str]:
    """Return the HF names that lora.targets change, with those that servers need beside them
    (ONE_CALL).
    """
    spec = make_spec(load_hf_config(checkpoint))
    changing = {name for entry in adapted(spec, tuple(targets)) for name in entry.hf_names}
    every = {name for entry in entries(spec) for name in entry.hf_names}
    for name in tuple(changing):
        if part := next(filter(name.endswith, ONE_CALL), None):
            changing |= {name.removesuffix(part) + other for other in ONE_CALL} & every
    return frozenset(changing)


def changing_part(
    tensors: Iterable[HFTensor], expected: Expected, weights: PushedWeights
) -> tuple[Iterator[HFTensor], Expected]:
    """Return those of an export that training changes, and of its expected tensors.

    The stream exhausts the export, which is collective.
    """
    changing = weights.changing or expected.keys()
    part = {name: expected[name] for name in expected if name in changing}
    return (tensor for tensor in tensors if tensor.name in changing), part


def expected_tensors(checkpoint: Path, dtype: torch.dtype) -> Expected:
    """Return every tensor of the checkpoint that is pushed.

    Most tensors are stored in the model's dtype and are sent in the servers' `dtype`.  The few that
    are stored in another one (such as a float32 router bias of a bfloat16 model) are sent as
    stored, and so is every expert-selection bias: servers keep it in float32, and a rounded one
    would select other experts.  Raises WeightPushError for a dtype that cannot be pushed.
    """
    model = outline(checkpoint)
    stored = {
        name: header
        for name, header in read_headers(checkpoint).items()
        if not is_left_out(name, model)
    }
    for name, header in stored.items():
        if header.dtype not in DTYPES:
            raise WeightPushError(
                f"{header.file}: {name} has dtype {header.dtype}, must be one of"
                f" {', '.join(DTYPES)}; pushing quantised weights is not supported"
            )
    most = Counter(header.dtype for header in stored.values()).most_common(1)[0][0]
    return {
        name: (
            header.shape,
            dtype
            if header.dtype == most and not name.endswith(SELECTION_BIAS)
            else DTYPES[header.dtype],
        )
        for name, header in stored.items()
    }


def checked_stream(
    tensors: Iterable[HFTensor], expected: Expected, checkpoint: Path
) -> Iterator[HFTensor]:
    """Yield the same tensors, in the dtypes to send.

    Raises WeightPushError for a name or shape that is not the checkpoint's, for a name that occurs
    twice, and at the end for tensors that are missing.
    """
    seen: set[str] = set()
    for exported in tensors:
        name = exported.name
        if name not in expected or name in seen:
            problem = "occurs twice" if name in seen else f"is not in {checkpoint}"
            raise WeightPushError(f"exported tensor {name!r} {problem}")
        shape, dtype = expected[name]
        if exported.shape != shape:
            raise WeightPushError(
                f"exported tensor {name!r} has shape {exported.shape}, {checkpoint} has {shape}"
            )
        seen.add(name)
        yield HFTensor(name, shape, dtype, exported.source, exported.tensor)
    if missing := sorted(set(expected) - seen):
        raise WeightPushError(
            f"{len(missing)} tensors of {checkpoint} were not exported, first {missing[0]!r}"
        )
