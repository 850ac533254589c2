"""Models with TransformerEngine's layers, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine import model
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config

HOPPER = SimpleNamespace(
    major=9, minor=0, name="H100", multi_processor_count=132, total_memory=80 << 30
)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """TransformerEngine asks CUDA about the device while layers are made; nothing is computed
    there.
    """
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: HOPPER),
    ):
        yield


def build(
    path: Path,
    parallel: Parallel,
    layout: ParallelConfig | None = None,
    *,
    te: bool,
    **settings: object,
) -> tuple[list[GPTModel], ModelSpec, TransformerConfig]:
    """Chunks of the model at `path`, with TransformerEngine's or with local layers; float32 on the
    CPU.
    """
    spec, cfg = make_spec(load_hf_config(path)), ModelConfig(path=path, dtype="float32", **settings)
    with mock.patch.object(model, "uses_transformer_engine", lambda *_: te), pretended_gpu():
        config = model.make_transformer_config(
            spec, cfg, layout or ParallelConfig(), torch.device("cpu")
        )
        return model.make_model(spec, cfg, config, parallel), spec, config
