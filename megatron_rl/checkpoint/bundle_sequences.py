"""The sequences of a saved mini-batch, whatever layout saved them.

Shapes: T packed rows, L MoE layers, K top-k.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.batch.transfer import decode_samples
from megatron_rl.records import Sample


class BundleError(ValueError):
    """A folder that is no saved mini-batch, or cannot be computed here."""


def replica_name(dp_rank: int) -> str:
    return f"replica_{dp_rank:05d}.safetensors"


def rank_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class SavedSequences:
    """The sequences of all replicas, and by sequence what the saved ranks held in their rows."""

    def __init__(self, folder: Path, replicas: int, ranks: int) -> None:
        self._samples: list[Sample] = []
        # id -> replica, micro-batch, packed rows
        self._places: dict[str, tuple[int, int, slice]] = {}
        # of a replica's micro-batch, all packed rows
        self._rows: dict[tuple[int, int, str], Tensor] = {}
        sizes: dict[tuple[int, int], int] = {}
        for replica in range(replicas):
            for number, (samples, rows) in enumerate(read_replica(folder, replica)):
                sizes[replica, number] = sum(rows)
                self._add(replica, number, samples, rows)
        for rank in range(ranks):
            self._read_rank(read_bundle_tensors(folder / rank_name(rank)), sizes)

    def samples(self, *, with_record: bool) -> list[Sample]:
        """with_record: with the experts that R2 recorded, in place of the server's."""
        return (
            [self._recorded(sample) for sample in self._samples] if with_record else self._samples
        )

    def values(self, name: str, kind: str) -> Tensor | None:
        """Those of a sequence's own rows; None where none were saved."""
        replica, number, rows = self._places[name]
        found = self._rows.get((replica, number, kind))
        return None if found is None else found[rows]

    def blank(self, kind: str, num_rows: int) -> Tensor | None:
        """Rows of zeros like those of `kind`; None where none were saved."""
        found = next((table for (*_, name), table in self._rows.items() if name == kind), None)
        return None if found is None else found.new_zeros(num_rows, *found.shape[1:])

    def _add(
        self, replica: int, number: int, samples: Sequence[Sample], rows: Sequence[int]
    ) -> None:
        start = 0
        for sample, size in zip(samples, rows, strict=False):  # pads come last
            rollout = sample.rollout
            if rollout.id in self._places:  # a prompt that was drawn twice
                rollout = replace(rollout, id=f"{rollout.id}@{len(self._places)}")
            self._samples.append(replace(sample, rollout=rollout))
            self._places[rollout.id] = replica, number, slice(start, start + len(rollout.tokens))
            start += size

    def _read_rank(
        self, values: Mapping[str, Tensor], sizes: Mapping[tuple[int, int], int]
    ) -> None:
        replica, *layers = values["place"].tolist()
        for number in range(len(keys_of(values, "model_rows"))):
            of_model, of_router = values[f"{number}:model_rows"], values[f"{number}:router_rows"]
            for kind in ("logprobs", "reference"):
                if (found := values.get(f"{number}:{kind}")) is not None:
                    key = replica, number, kind
                    self._rows.setdefault(key, torch.zeros(sizes[key[:2]]))[of_model] = found
            for kind in ("recorded", "router_ids", "router_logprobs"):
                if (found := values.get(f"{number}:{kind}")) is not None:
                    for layer, rows in zip(layers, found, strict=True):
                        key = replica, number, f"{kind} {layer}"
                        table = self._rows.setdefault(
                            key, rows.new_zeros(sizes[key[:2]], rows.shape[1])
                        )
                        table[of_router] = rows

    def _recorded(self, sample: Sample) -> Sample:
        rollout, layers = sample.rollout, itertools.count()
        found = list(iter(lambda: self.values(rollout.id, f"recorded {next(layers)}"), None))
        if not found:
            raise BundleError(
                f"rollout {rollout.id}: no recorded experts; replay.mode = R2 needs them"
            )
        # of the saved type: a micro-batch has one for all its sequences, whatever their largest ids
        # are
        routes = np.stack([ids[:-1].numpy() for ids in found]).transpose(1, 0, 2)
        return replace(
            sample,
            rollout=replace(
                rollout, routed_experts=routes, missing_routes=None, routes_digest=None
            ),
        )


def read_replica(folder: Path, replica: int) -> list[tuple[tuple[Sample, ...], list[int]]]:
    """(sequences, rows of each and then of pads) of every micro-batch of a replica."""
    tensors = read_bundle_tensors(folder / replica_name(replica))
    return [
        (
            tuple(decode_samples(tensors[f"{number}:samples"].numpy())),
            tensors[f"{number}:rows"].tolist(),
        )
        for number in range(len(tensors) // 2)
    ]


def keys_of(values: Mapping[str, Tensor], kind: str) -> list[str]:
    """ "0:KIND", "1:KIND" ... as far as there are any."""
    found = sum(key.endswith(f":{kind}") for key in values)
    return [f"{number}:{kind}" for number in range(found)]


def read_bundle_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"{path}: cannot be read: {error}; the folder is not complete, copy it again"
        ) from error
