"""[megatron] on real ranks: gradients that are reduced in buckets while the backward pass runs are
those of one reduction.
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 2000}


@pytest.fixture(scope="module")
def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder) / "moe")
        random_checkpoint(Path(folder) / "tied", tie_word_embeddings=True)
        yield Path(folder)


def updated_weights(checkpoint, layout, lora, distributed, fused, megatron):
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    # the norm is summed over other shards: not bit for bit
    optim = {"distributed": distributed, "clip_grad": 0.0}
    options = {"parallel": layout, "model": {"fused_lm_head": fused}, "optim": optim}
    engine = make_engine(checkpoint, megatron=megatron, lora=lora, **options)
    batch = random_batch(engine)
    assert len(batch.micro_batches) > 1  # gradients are reduced with the last one only
    for _ in range(2):
        sums = MetricSums()
        engine.update(batch, engine.old_logprobs(batch, sums, replay="R3"), sums, replay="R3")
    assert sums.reduce(dist.group.WORLD, engine.parallel.device)["optim/grad_norm"] > 0
    weights = [
        parameter.detach().clone() for chunk in engine.chunks for parameter in chunk.parameters()
    ]
    buckets = sum(len(group.buckets) for model in engine.models for group in model.bucket_groups)
    engine.parallel.destroy()
    return weights, buckets


def overlapped_equals_plain(checkpoint, layout, lora):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for distributed in (False, True):
        for fused in (False, True):
            plain, whole = updated_weights(checkpoint, layout, lora, distributed, fused, {})
            overlapped, buckets = updated_weights(
                checkpoint, layout, lora, distributed, fused, OVERLAPPED
            )
            # core makes several buckets there alone
            is_first_stage = "pp" not in layout or dist.get_rank() == 0
            assert (whole, buckets > 1) == (1, is_first_stage)
            for a, b in zip(plain, overlapped, strict=True):
                assert torch.equal(a, b), (distributed, fused)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "layout", "lora"),
    [
        pytest.param("moe", {}, {}, id="dp2", marks=pytest.mark.slow),
        pytest.param("moe", {"ep": 2}, {}, id="ep2"),
        pytest.param("moe", {"pp": 2}, {}, id="pp2"),
        pytest.param("tied", {}, {}, id="tied", marks=pytest.mark.slow),
        pytest.param("moe", {"ep": 2}, {"rank": 4}, id="adapters"),
    ],
)
def test_overlapped_reduction_gives_the_same_weights(checkpoint, model, layout, lora):
    run_ranks(overlapped_equals_plain, 2, checkpoint / model, layout, lora)
