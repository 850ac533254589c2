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
from megatron_rl.records.packed import Sample


class BundleError(ValueError):
    """A folder that is no saved mini-batch, or one that cannot be computed here."""


def replica_name(dp_rank: int) -> str:
    return f"replica_{dp_rank:05d}.safetensors"


def rank_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class SavedSequences:
    """The sequences of all replicas, and the values that the saved ranks had for their rows."""

    def __init__(self, folder: Path, replicas: int, ranks: int) -> None:
        self._samples: list[Sample] = []
        self._places: dict[str, tuple[int, int, slice]] = {}
        """Id of a sequence -> replica, micro-batch, packed rows."""
        self._rows: dict[tuple[int, int, str], Tensor] = {}
        """Replica, micro-batch and kind -> values of all packed rows."""
        sizes: dict[tuple[int, int], int] = {}
        for replica in range(replicas):
            for number, (samples, rows) in enumerate(read_replica(folder, replica)):
                sizes[replica, number] = sum(rows)
                self._add(replica, number, samples, rows)
        for rank in range(ranks):
            self._read_rank(read_bundle_tensors(folder / rank_name(rank)), sizes)

    def samples(self, *, with_record: bool) -> list[Sample]:
        """Return all sequences.

        `with_record` puts the experts that R2 recorded in place of the server's.
        """
        return (
            [self._recorded(sample) for sample in self._samples] if with_record else self._samples
        )

    def values(self, name: str, kind: str) -> Tensor | None:
        """Return the values of a sequence's rows; None where no values of this kind were saved."""
        replica, number, rows = self._places[name]
        table = self._rows.get((replica, number, kind))
        return None if table is None else table[rows]

    def blank(self, kind: str, num_rows: int) -> Tensor | None:
        """Return rows of zeros like those of `kind`.

        Returns None where no values of this kind were saved.
        """
        for (*_, name), table in self._rows.items():
            if name == kind:
                return table.new_zeros(num_rows, *table.shape[1:])
        return None

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
            size = sizes[replica, number]
            for kind in ("logprobs", "reference"):
                if (saved := values.get(f"{number}:{kind}")) is not None:
                    table = self._rows.setdefault((replica, number, kind), torch.zeros(size))
                    table[of_model] = saved
            for kind in ("recorded", "router_ids", "router_logprobs"):
                if (saved := values.get(f"{number}:{kind}")) is not None:
                    # the stages of a replica have different layers
                    for layer, rows in zip(layers, saved, strict=True):
                        key = replica, number, f"{kind} {layer}"
                        table = self._rows.setdefault(key, rows.new_zeros(size, rows.shape[1]))
                        table[of_router] = rows

    def _recorded(self, sample: Sample) -> Sample:
        rollout, layers = sample.rollout, itertools.count()
        # layer after layer, until no values of the next one were saved
        recorded = list(iter(lambda: self.values(rollout.id, f"recorded {next(layers)}"), None))
        if not recorded:
            raise BundleError(
                f"rollout {rollout.id}: no recorded experts; replay.mode = R2 needs them"
            )
        # keeps the saved dtype: a micro-batch has one for all its sequences, not one for the
        # largest id of each
        # [:-1]: routes have no row for the last token
        routes = np.stack([ids[:-1].numpy() for ids in recorded]).transpose(1, 0, 2)
        with_routes = replace(
            rollout, routed_experts=routes, missing_routes=None, routes_digest=None
        )
        return replace(sample, rollout=with_routes)


def read_replica(folder: Path, replica: int) -> list[tuple[tuple[Sample, ...], list[int]]]:
    """Return, for each micro-batch of a replica, its sequences and the rows of each.

    Rows of pads come last.
    """
    tensors = read_bundle_tensors(folder / replica_name(replica))
    return [
        (
            tuple(decode_samples(tensors[f"{number}:samples"].numpy())),
            tensors[f"{number}:rows"].tolist(),
        )
        # samples and rows of every micro-batch
        for number in range(len(tensors) // 2)
    ]


def keys_of(values: Mapping[str, Tensor], kind: str) -> list[str]:
    """Return the keys "0:KIND", "1:KIND", ... that `values` has."""
    count = sum(key.endswith(f":{kind}") for key in values)
    return [f"{number}:{kind}" for number in range(count)]


def read_bundle_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"{path}: cannot be read: {error}; the folder is not complete, copy it again"
        ) from error
