"""Adam's state on the host (optimizer_cpu_offload) and in fewer bits, as with
use_precision_aware_optimizer, on two real ranks: saved and resumed bit for bit, also in another
layout.

megatron-core's CPU offload runs for real, with the CPU as the device.  TransformerEngine's Adam
needs a GPU: a stand-in with its state takes its place.
"""

import gc
import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import (
    BF16,
    DISTRIBUTED,
    PROGRESS,
    SCHEDULE,
    run_parts,
    save_and_resume,
    updates,
)
from tests.dist.test_checkpoint import case as resumed_case
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        yield random_checkpoint(Path(folder) / "moe")


def offload(fraction, **fields):
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, **fields}


def case(parallel, megatron, **others):
    return resumed_case(parallel, optim=DISTRIBUTED, model=BF16, megatron=megatron, **others)


PRECISE = {"use_precision_aware_optimizer": True}
OVERLAP = {"overlap_cpu_optimizer_d2h_h2d": True}
FEW_BITS = PRECISE | {
    "main_grads_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
}  # fmt: skip
ASYNC = {"async_save": True}
OFFLOADED = {
    "all": case({"ep": 2}, offload(1.0, **OVERLAP), saving=ASYNC),
    "half": case({"tp": 2, "ep": 2, "etp": 1}, offload(0.5)),
    "all_before_the_first_update": case({"pp": 2}, offload(1.0), after=0),
}
IN_FEWER_BITS = {
    "moments_and_remainders": case({"ep": 2}, FEW_BITS, saving=ASYNC),
    "whole_weights": case({}, PRECISE | {"store_param_remainders": False}),
    "before_the_first_update": case({"tp": 2}, FEW_BITS, after=0),
    "half_on_the_host": case({}, offload(0.5, **PRECISE, **OVERLAP), saving=ASYNC),
    "bfloat16_gradients_of_the_host": case(
        {"ep": 2}, offload(1.0, **PRECISE, **OVERLAP, main_grads_dtype="bfloat16")
    ),
}


def with_fused_adam(function, *arguments):
    """On a rank: `function` with the stand-in of TransformerEngine's Adam."""
    from tests import fused_adam

    fused_adam.install()
    return function(*arguments)


def offloaded_optimizers(checkpoint):
    import torch.distributed as dist
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from megatron_rl.engine.optim import core_optimizers
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    gc.disable()  # nothing else collects the first ones
    engine = make_engine(
        checkpoint, parallel={"ep": 2}, optim=DISTRIBUTED, model=BF16, megatron=offload(0.5)
    )
    alive = [item for item in gc.get_objects() if isinstance(item, HybridDeviceOptimizer)]
    assert len(alive) == len(core_optimizers(engine.optimizer.core)) == 2
    engine.parallel.destroy()
    dist.destroy_process_group()


def test_of_the_optimizers_that_core_makes_twice_one_keeps_weights(checkpoint):
    run_ranks(offloaded_optimizers, 2, checkpoint)


def test_offloaded_state_resumes_bit_for_bit(checkpoint, tmp_path):
    run_ranks(run_parts, 2, (save_and_resume, checkpoint, tmp_path, OFFLOADED))


@pytest.mark.slow
def test_state_in_fewer_bits_resumes_bit_for_bit(checkpoint, tmp_path):
    part = (with_fused_adam, save_and_resume, checkpoint, tmp_path, IN_FEWER_BITS)
    run_ranks(run_parts, 2, part)


# Other layouts ------------------------------------------------------------------------------------


def save_again(checkpoint, folder, source, targets):
    """Save in one layout; load it in others, and save there: the tensors' names and dtypes."""
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from tests.dist.engines import make_engine

    def engine_of(parallel, megatron):
        settings = {"model": BF16, "optim": SCHEDULE | DISTRIBUTED, "megatron": megatron}
        # whether Adam's state is on the host is not what was trained
        changes = {"allow_changes": ["megatron.*"]}
        return make_engine(checkpoint, parallel=parallel, checkpoint=changes, **settings)

    engine = engine_of(*source)
    updates(engine, [0, 1])
    Checkpointer(engine, folder / "source").save(Snapshot(2, PROGRESS))
    engine.parallel.destroy()
    for name, target in targets.items():
        engine = engine_of(*target)
        Checkpointer(engine, folder / "source").load(folder / "source/step_000002")
        check_copies(engine)
        Checkpointer(engine, folder / name).save(Snapshot(2, PROGRESS))
        updates(engine, [2])  # trains
        engine.parallel.destroy()


def check_copies(engine):
    """Weights that are both on the device and on the host are the same, up to their dtype."""
    from megatron_rl.checkpoint.state import inner_optimizers

    for optimizer in inner_optimizers(engine):
        pairs = getattr(optimizer.optimizer, "param_to_inner_param", {})
        assert all(ours.equal(host.to(ours.dtype)) for ours, host in pairs.items())


def content(folder):
    """{name: tensor} of a checkpoint."""
    import torch

    from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist
    from megatron_rl.checkpoint.torch_dist.chunks import Chunk

    stored = TorchDist(folder / "step_000002")
    tensors = {}
    for key in stored.tensors():
        shape = stored.shape(key)
        whole = Chunk(key, shape, (0,) * len(shape), shape)
        tensors[key] = torch.empty(shape, dtype=stored.dtype(key))
        stored.fill(whole, 0, tensors[key])
    return tensors


def check_saved_again(folder, names, dtypes):
    source = content(folder / "source")
    kept = {key: tensor.dtype for key, tensor in source.items() if key.startswith("optimizer.")}
    for part, dtype in dtypes.items():
        found = {kept[key] for key in kept if key.startswith(f"optimizer.state.{part}.")}
        assert {str(one) for one in found} == {f"torch.{dtype}"}, part
        assert any(source[key].any() for key in kept if f".{part}." in key), part
    for name in names:
        again = content(folder / name)
        assert again.keys() == source.keys(), name
        different = [key for key in source if not source[key].equal(again[key])]
        assert not different, (name, different[:3])


def test_offloaded_state_loads_in_other_layouts_and_without_offload(checkpoint, tmp_path):
    targets = {
        "tp": ({"tp": 2, "ep": 2, "etp": 1}, offload(0.5, **OVERLAP)),
        "pp": ({"pp": 2}, offload(0.3)),
        "device": ({}, {}),
    }
    source = ({"ep": 2}, offload(1.0))
    run_ranks(run_parts, 2, (save_again, checkpoint, tmp_path, source, targets))
    float32 = dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), "float32")
    check_saved_again(tmp_path, targets, float32)


def test_state_in_fewer_bits_loads_in_other_layouts(checkpoint, tmp_path):
    targets = {"tp": ({"tp": 2, "ep": 2, "etp": 1}, FEW_BITS), "dp": ({}, FEW_BITS)}
    source = ({"ep": 2}, FEW_BITS)
    part = (with_fused_adam, save_again, checkpoint, tmp_path, source, targets)
    run_ranks(run_parts, 2, part)
    dtypes = {"param": "int16", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    check_saved_again(tmp_path, targets, dtypes)
