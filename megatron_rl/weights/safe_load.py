"""A torch_dist checkpoint into a sharded state dict: whoever can write a checkpoint must not run code by it.

megatron-core's own load (and torch's) unpickles `.metadata` and every stored object as they are.  Here `.metadata` is read once,
by a reader that admits the classes of the format alone (torch_dist.read_metadata), and everything is loaded from what was read
then: a file that is replaced meanwhile changes values at most.  common.pt, tensors and objects go through torch.load with
weights_only=True.  Objects are the layers' extra states, which TransformerEngine would unpickle itself; they must be empty, as
all but FP8 layers' are.  Factories, names and shards are core's, by the steps of dist_checkpointing.load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_rl.weights.hf.files import CheckpointError, load_plain
from megatron_rl.weights.torch_dist import Chunk, TorchDist

COMMON_FILE, COMMON_OBJECT = (
    "common.pt",
    "common_state",
)  # core 0.16 and 0.19; we have nothing in it, and core's is not used


class SafeCheckpoint:
    """A torch_dist checkpoint whose `.metadata` and common.pt were read.

    Raises CheckpointError, which names the file, where they hold anything but metadata, tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        self.tensors = TorchDist(path)
        common = Path(path) / COMMON_FILE
        if common.exists():
            load_plain(common)

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """The sharded state dict `request`, filled.  Collective.

        Tensors that have memory are filled in place, after all objects were read.  Raises CheckpointError for what cannot be
        read or is of another shape, and core's CheckpointingException where request and checkpoint have different names.
        """
        state, plain, factories = load_preprocess(request)
        state, _ = extract_sharded_base(state)
        mine, everywhere = determine_global_metadata(state)
        validate_integrity_and_strict_load(state, StrictHandling.RAISE_ALL, True, mine, everywhere, self._stored())
        dict_list_map_inplace(self._with_object, state)
        dict_list_map_inplace(self._with_values, state)
        merge(plain, state)
        return apply_factory_merges(plain, factories)

    def _stored(self) -> dict[str, ShardedTensor | ShardedObject]:
        """Everything that the checkpoint has, without data, as core compares it with a request."""
        found: dict[str, ShardedTensor | ShardedObject] = {}
        for key, about in self.tensors.metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata):
                like = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, like).without_data()
            elif isinstance(about, BytesStorageMetadata) and not key.startswith(f"{COMMON_OBJECT}/"):
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def _with_object(self, wanted: Any) -> Any:
        """A layer's extra state; core stores a list of one."""
        if not isinstance(wanted, ShardedObject):
            return wanted
        tensors, key = self.tensors, wanted.unique_key
        states = tensors.read_object(key)
        if not isinstance(states, list) or len(states) != 1 or not is_empty(states[0]):
            raise CheckpointError(
                f"{tensors.path}: object {key} is a layer's extra state that is not empty; TransformerEngine would unpickle it. "
                "Rule: no FP8 layers; do not load a checkpoint that you did not write"
            )
        return states[0]

    def _with_values(self, wanted: Any) -> Any:
        """This rank's shard.  A padded vocabulary may be stored with another number of rows: rows that are missing are 0."""
        if not isinstance(wanted, ShardedTensor):
            return wanted
        tensors, axes = self.tensors, wanted.prepend_axis_num
        stored = tensors.shape(wanted.key)
        if stored != tuple(wanted.global_shape) and not wanted.allow_shape_mismatch:
            raise CheckpointError(
                f"{tensors.path}: {wanted.key} has shape {list(stored)}, the model's has {list(wanted.global_shape)}; "
                "model.path must be the model that was trained"
            )
        wanted.init_data("cpu")
        values: torch.Tensor = wanted.data.detach()
        if wanted.allow_shape_mismatch:
            values.zero_()
        sizes = (1,) * axes + tuple(values.shape)
        chunk = Chunk(wanted.key, tuple(wanted.global_shape), tuple(wanted.global_offset), sizes)
        tensors.fill(chunk, axes, values[(None,) * axes], allow_missing=wanted.allow_shape_mismatch)
        return values


def is_empty(state: Any) -> bool:
    return state is None or (isinstance(state, torch.Tensor) and state.numel() == 0)
