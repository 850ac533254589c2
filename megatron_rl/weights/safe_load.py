"""megatron-core's dist_checkpointing.load with readers of our own: whoever can write a checkpoint must not run code by it.

core and torch unpickle `.metadata` and every stored object as they are.  Here `.metadata` is read once, by a reader that admits
the classes of the format alone (torch_dist.read_metadata), and everything is loaded from what was read then: a file that is
replaced meanwhile changes values at most.  common.pt and stored objects go through torch.load with weights_only=True.
Objects are the layers' extra states, which TransformerEngine would unpickle itself; they must be empty, as all but FP8 layers'
are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_rl.weights.hf_files import CheckpointError, load_plain
from megatron_rl.weights.torch_dist import Chunk, TorchDist

COMMON = "common.pt"


class SafeCheckpoint:
    """A torch_dist checkpoint whose `.metadata` and common.pt were read.

    Raises CheckpointError, which names the file, where they hold anything but metadata, tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        self.tensors = TorchDist(path)
        self.common = load_plain(Path(path) / COMMON)

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """The sharded state dict `request`, filled.  Collective.

        Tensors that have memory are filled in place, after all objects were read.  Raises CheckpointError for what cannot be
        read or is of another shape, and core's CheckpointingException where request and checkpoint have different names.
        """
        path = str(self.tensors.path)
        return dist_checkpointing.load(  # type: ignore[no-any-return]
            request, path, _Sharded(self), _Common(self), strict=StrictHandling.RAISE_ALL
        )


class _AnyVersion:
    """core asks whether a strategy fits the format that metadata.json names."""

    can_handle_sharded_objects = True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend not in ("torch_dist", "torch"):
            raise CheckpointError(f"a checkpoint of format {loaded_backend!r}, supported: torch_dist")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise CheckpointError(f"a checkpoint of torch_dist version {loaded_version}, supported: 1")


class _Common(_AnyVersion, LoadCommonStrategy):  # type: ignore[misc]
    def __init__(self, checkpoint: SafeCheckpoint) -> None:
        self.checkpoint = checkpoint

    def load_common(self, checkpoint_dir: str) -> dict[str, Any]:
        return dict(self.checkpoint.common)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str) -> Any:
        raise NotImplementedError("objects are the other strategy's")


class _Sharded(_AnyVersion, LoadShardedStrategy):  # type: ignore[misc]
    def __init__(self, checkpoint: SafeCheckpoint) -> None:
        self.checkpoint = checkpoint

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> dict[str, Any]:
        dict_list_map_inplace(self._with_object, sharded_state_dict)
        return dict_list_map_inplace(self._with_values, sharded_state_dict)  # type: ignore[no-any-return]

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        stored = self.checkpoint.tensors.metadata.state_dict_metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            ).without_data()
            for key, about in stored.items()
            if isinstance(about, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        stored = self.checkpoint.tensors.metadata.state_dict_metadata
        keys = [key for key, about in stored.items() if isinstance(about, BytesStorageMetadata)]
        objects = [ShardedObject.empty_from_unique_key(key) for key in keys]
        return {item.unique_key: item for item in objects} | self.load_tensors_metadata(checkpoint_dir)

    def _with_object(self, wanted: Any) -> Any:
        """A layer's extra state; core stores a list of one."""
        if not isinstance(wanted, ShardedObject):
            return wanted
        tensors, key = self.checkpoint.tensors, wanted.unique_key
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
        tensors, axes = self.checkpoint.tensors, wanted.prepend_axis_num
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
