"""Loads a torch_dist checkpoint without running code that someone put into it.

The loads of megatron-core and torch unpickle `.metadata` and every stored object.  Here `.metadata`
is read once, by a reader that admits only the classes of the format (metadata.py): a file that is
replaced later can change values, but not run code.  common.pt, tensors and objects go through
torch.load with weights_only=True.  Objects are the extra states of layers, which TransformerEngine
would unpickle; they must be empty, and are, except in FP8 layers.

Factories, names and shards are core's: the steps are those of dist_checkpointing.load.  Names may
be those of TransformerEngine's or of local layers (weights/names.py).  A layer whose extra state
was not saved (local norms have none) gets an empty one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from megatron.core import __version__ as core_version
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)

from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist, check_keys
from megatron_rl.checkpoint.torch_dist.chunks import Chunk
from megatron_rl.weights.hf.files import CheckpointError, load_plain
from megatron_rl.weights.names import canonical

COMMON_FILE = "common.pt"  # core's common state, which we keep empty


class SafeCheckpoint:
    """A torch_dist checkpoint whose `.metadata` and common.pt have been read."""

    def __init__(self, path: Path, saved_by: str = "") -> None:
        """Read `.metadata` and common.pt.

        `saved_by` is the version of megatron-core that wrote the checkpoint; "" where it is not
        known and not to be suspected.  Raises CheckpointError, which names the file, where they
        hold anything but metadata, tensors and plain values.
        """
        self.tensors = TorchDist(path)
        self.where = str(path)
        if saved_by:
            self.where += f", saved by megatron-core {saved_by}, loaded by {core_version}"
        self.other_core = saved_by not in ("", core_version)
        if (path / COMMON_FILE).exists():
            load_plain(path / COMMON_FILE)  # only checked

    def load(self, request: ShardedStateDict, *, converts: bool = False) -> StateDict:
        """Fill the sharded state dict `request` and return it.  Collective.

        Tensors that have memory are filled in place, after all objects were read; `converts` casts
        them to the dtypes of the request.  Raises CheckpointError for what cannot be read or has
        another shape or dtype, and where request and checkpoint have different tensors.
        """
        # core's steps: factories become the tensors that are stored, and merge them after the load
        state, plain, factories = load_preprocess(request)
        state, _ = extract_sharded_base(state)
        _, everywhere = determine_global_metadata(state)
        wanted = {
            canonical(part.key)
            for rank in everywhere
            for part in rank
            if isinstance(part, ShardedTensor)
        }
        check_keys(self.where, wanted, self.tensors.tensors(), other_core=self.other_core)
        validate_sharding_integrity(everywhere)
        # objects first: a refused one leaves the tensors unchanged
        dict_list_map_inplace(self._with_object, state)
        dict_list_map_inplace(partial(self._with_values, converts=converts), state)
        merge(plain, state)
        return apply_factory_merges(plain, factories)

    def _with_object(self, requested: object) -> object:
        """Return a layer's extra state in place of its request; core stores a list of one."""
        if not isinstance(requested, ShardedObject):
            return requested
        tensors, key = self.tensors, requested.unique_key
        if key not in tensors.metadata.state_dict_metadata:
            return None
        states = tensors.read_object(key)
        if not isinstance(states, list) or len(states) != 1 or not is_empty(states[0]):
            raise CheckpointError(
                f"{tensors.path}: object {key} is a layer's extra state that is not empty;"
                " TransformerEngine would unpickle it. FP8 layers are not supported; do not load a"
                " checkpoint that you did not write"
            )
        return states[0]

    def _with_values(self, requested: object, *, converts: bool) -> object:
        """Return this rank's shard in place of its request.

        A padded vocabulary may be stored with another number of rows: missing rows are 0.
        """
        if not isinstance(requested, ShardedTensor):
            return requested
        tensors, axes = self.tensors, requested.prepend_axis_num
        shape = tuple(requested.global_shape)
        stacked = axes or max(len(shape) - 2, 0)  # axes before those of rows and columns
        stored = tensors.shape(requested.key)
        if stored != shape and not requested.allow_shape_mismatch:
            raise CheckpointError(
                f"{tensors.path}: {requested.key} has shape {list(stored)}, the model's has"
                f" {list(shape)}; model.path must be the model that was trained"
            )
        dtype = tensors.dtype(requested.key)
        if dtype != requested.dtype and not converts:
            raise CheckpointError(
                f"{tensors.path}: {requested.key} has dtype {dtype}, the model's has"
                f" {requested.dtype}; model.dtype must be that of the run that saved it"
            )
        requested.init_data("cpu")
        values: torch.Tensor = requested.data.detach()
        if requested.allow_shape_mismatch:  # core sets it only for a padded vocabulary
            values.zero_()
        sizes = (1,) * axes + tuple(values.shape)
        chunk = Chunk(requested.key, shape, tuple(requested.global_offset), sizes)
        tensors.fill(
            chunk, stacked, values[(None,) * axes], allow_missing=requested.allow_shape_mismatch
        )
        return values


def is_empty(state: object) -> bool:
    return state is None or (isinstance(state, torch.Tensor) and state.numel() == 0)
