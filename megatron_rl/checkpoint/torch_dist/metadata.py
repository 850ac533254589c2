"""Reads `.metadata` of a torch_dist checkpoint without running code that someone put into it.

The format defines `.metadata` as a pickle: only the classes that the format needs are admitted.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.weights.hf.files import CheckpointError

ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


def read_metadata(path: Path) -> Metadata:
    """Read `.metadata` of a torch_dist checkpoint.

    Raises CheckpointError where it is missing, or pickles anything but metadata.
    """
    file = Path(path) / ".metadata"
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not a torch_dist checkpoint (no .metadata)") from error
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file}: holds no checkpoint metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Admits the records that torch and megatron-core put into metadata, by exact name.

    The plain classes in these records are admitted, too.
    """

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which checkpoint metadata does not need"
        )
