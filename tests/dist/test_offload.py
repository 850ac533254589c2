"""Weights, gradients and optimizer state leave the device between steps and come back bit for bit
(two real ranks, gloo).
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

CASES = [
    ({"tp": 2}, {"distributed": True}, {"dtype": "bfloat16"}, {}),
    ({"ep": 2}, {"distributed": True}, {}, {}),
    ({"pp": 2}, {"distributed": False}, {"dtype": "bfloat16"}, {}),
    # Adam of the host and of the device; here the host is the device too
    (
        {"ep": 2},
        {"distributed": True},
        {"dtype": "bfloat16"},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
]


def storages(engine):
    """Every storage that weights, gradients and optimizer state are in, found through the tensors
    themselves.
    """
    import torch

    tensors = [each for model in engine.models for each in model.parameters()]
    tensors += [each.main_grad for each in tensors]
    for part in getattr(engine.optimizer.core, "chained_optimizers", [engine.optimizer.core]):
        if part.optimizer is None:
            continue
        for adam in (part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())):
            parameters = [each for group in adam.param_groups for each in group["params"]]
            gradients = [each.grad for each in parameters if each.is_leaf]
            tensors += parameters + [each for each in gradients if each is not None]
            state = [value for values in adam.state.values() for value in values.values()]
            tensors += [value for value in state if isinstance(value, torch.Tensor)]
    return {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}.values()


def alternate(engine):
    """What happens around a sampling; checks that nothing is left, and that weights can be sent
    half-way.
    """
    before = sum(each.nbytes() for each in storages(engine))
    weights = {name: tensor.clone() for name, tensor in engine.export() if tensor is not None}
    freed = engine.offload.free_training()
    sent = {name: tensor.clone() for name, tensor in engine.export() if tensor is not None}
    assert (
        all(weights[name].equal(sent[name]) for name in weights) and weights.keys() == sent.keys()
    )
    freed += engine.offload.free_weights()
    assert freed == before > 0
    assert sum(each.nbytes() for each in storages(engine)) == 0
    with pytest.raises(AssertionError, match="the servers have the memory"):
        engine._set_mode(training=False)
    engine.offload.restore()
    assert sum(each.nbytes() for each in storages(engine)) == before
    assert all(each.main_grad.eq(0).all() for model in engine.models for each in model.parameters())


def train(checkpoint, case, *, offload):
    import torch
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    layout, optim, model, megatron = case
    engine = make_engine(checkpoint, parallel=layout, optim=optim, model=model, megatron=megatron)
    engine.offload.host.chunk_bytes = 5000  # tensors lie across chunks
    batch = random_batch(engine)
    sums = MetricSums()
    for _ in range(3):
        if offload:
            alternate(engine)
        engine.update(batch, engine.old_logprobs(batch, sums, replay="R3"), sums, replay="R3")
    bits = [
        torch.empty(0, dtype=torch.uint8).set_(each).numpy().tobytes() for each in storages(engine)
    ]
    chunks = len(engine.offload.host.chunks)
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    engine.parallel.destroy()
    return bits, metrics, chunks


def alternating_equals_resident(checkpoint):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for case in CASES:
        resident, expected, none = train(checkpoint, case, offload=False)
        alternating, found, chunks = train(checkpoint, case, offload=True)
        assert alternating == resident, case
        assert repr(found) == repr(expected), "some are NaN"
        assert expected["optim/grad_norm"] > 0
        assert none == 0 and chunks > 3, "host memory is allocated once, and only where it is used"
    dist.destroy_process_group()


def test_steps_with_the_state_on_the_host_in_between_are_bit_equal():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(alternating_equals_resident, 2, random_checkpoint(Path(folder) / "moe"))
