"""Saving the distributed optimizer without a gather: its memory, core's gathered format, and
buckets; on four ranks.
"""

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import DISTRIBUTED, PROGRESS, equal, optimizer_of, updates
from tests.dist.test_engine import weights_of
from tests.tiny import random_checkpoint

LIMIT = 1.1  # of the bytes that a rank writes
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 1000}


def bytes_of(shards):
    return sum(tensor.nbytes for _, _, (_, tensors) in shards.buckets for _, tensor in tensors)


def optimizer_states(engine):
    from megatron_rl.checkpoint.state import inner_optimizers

    states = [
        optimizer.optimizer.state
        for optimizer in inner_optimizers(engine)
        if optimizer.optimizer is not None
    ]
    return [
        entry[name]
        for state in states
        for entry in state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def measure(checkpoint, folder):
    """Peak of resident bytes while saving (in this thread, in the background) and loading, and
    bytes that this rank writes.
    """
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.torch_dist.shard_writer import Shards
    from megatron_rl.plan.memory import checkpoint_bytes_of_rank
    from megatron_rl_tools.convert.conversion import reset_peak, resident_peak
    from tests.dist.engines import make_engine

    stage, written = Shards.stage, []

    def counted(self, *, copy):
        stage(self, copy=copy)
        written.append(bytes_of(self))

    Shards.stage = counted
    found = {}
    for way in ("direct", "background"):
        engine = make_engine(
            checkpoint, optim=DISTRIBUTED, checkpoint={"async_save": way == "background"}
        )
        writer = Checkpointer(engine, folder / way)
        writer.save(Snapshot(1, PROGRESS))  # creates moments, imports modules
        for moments in optimizer_states(engine):
            moments.normal_()  # memory of zeros is not resident until it is written to
        writer.wait()
        before = reset_peak()
        writer.save(Snapshot(2, PROGRESS))
        writer.wait()
        found[way] = resident_peak() - before
        before = reset_peak()
        writer.load(folder / way / "step_000002")
        found[f"load after {way}"] = resident_peak() - before
        computed = checkpoint_bytes_of_rank(engine.spec, engine.cfg, 4, 0)
        engine.parallel.destroy()
    Shards.stage = stage
    assert len(set(written)) == 1
    return written[0], computed, found


def formats(checkpoint, folder):
    """The state of an update in core's gathered format, and in ours from ranks with buckets: each
    loads into another layout.
    """
    from megatron_rl.checkpoint import state
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from tests.dist.engines import make_engine

    def gathered(optimizer, models):
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        found = optimizer.sharded_state_dict(models, metadata=metadata)
        return state.extract_matching_values(
            found, lambda value: isinstance(value, state.ShardedBase)
        )[0]

    parts = state.sharded_parts
    for name, fields in (("core", {}), ("buckets", BUCKETS)):
        for bits in ("bfloat16",) if name == "buckets" else ("float32", "bfloat16"):
            make = {"optim": DISTRIBUTED, "model": {"dtype": bits}}
            engine = make_engine(checkpoint, parallel={"ep": 2}, megatron=fields, **make)
            updates(engine, [0])
            state.sharded_parts = gathered if name == "core" else parts
            Checkpointer(engine, folder / name / bits).save(Snapshot(1, PROGRESS))
            state.sharded_parts = parts
            weights, moments = weights_of(engine), optimizer_of(engine)
            if name == "buckets":
                buckets = [
                    len(buffer.buckets) for chunk in engine.models for buffer in chunk.buffers
                ]
                assert max(buckets) > 3, buckets
            engine.parallel.destroy()
            allowed = {"allow_changes": [f"megatron.{field}" for field in BUCKETS]}
            for target in ({"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}):
                same = fields if target == {"ep": 2} else {}
                again = make_engine(
                    checkpoint, parallel=target, megatron=same, checkpoint=allowed, **make
                )
                Checkpointer(again, folder / name / bits).load(folder / name / bits / "step_000001")
                if target == {"ep": 2}:
                    assert equal(weights, weights_of(again)) and equal(
                        moments, optimizer_of(again)
                    ), (name, bits)
                else:  # saved again, in this layout: the same tensors
                    Checkpointer(again, folder / name / bits).save(Snapshot(2, PROGRESS))
                again.parallel.destroy()
            compare(folder / name / bits)


def compare(folder):
    """The tensors of step_000001 and step_000002 are the same, whatever their chunks."""
    import torch

    from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist
    from megatron_rl.checkpoint.torch_dist.chunks import Chunk

    one, other = (TorchDist(folder / f"step_00000{step}") for step in (1, 2))
    keys = one.tensors()
    assert keys == other.tensors() and any(
        key.startswith("optimizer.state.exp_avg_sq.") for key in keys
    )
    for key in keys:
        shape = one.shape(key)
        values = []
        for stored in (one, other):
            whole = torch.empty(shape, dtype=stored.dtype(key))
            stored.fill(Chunk(key, shape, (0,) * len(shape), shape), max(len(shape) - 2, 0), whole)
            values.append(whole)
        assert values[0].equal(values[1]), key


def on_ranks(large, small, folder):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    formats(small, folder)
    found = measure(large, folder / "memory")
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_rank_saves_what_it_owns_in_little_more_memory_than_that(tmp_path):
    """14 M parameters: of 227 MiB each of four ranks writes a quarter."""
    large = random_checkpoint(
        tmp_path / "large",
        vocab_size=2048,
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=2,
    )
    ranks = run_ranks(on_ranks, 4, large, random_checkpoint(tmp_path / "small"), tmp_path)
    for rank, (written, computed, peaks) in enumerate(ranks):
        assert abs(written / computed - 1) < 0.05, "the dry run computes what a rank writes"
        print(
            f"rank {rank}: writes {written / 2**20:.1f} MiB",
            {way: f"{peak / 2**20:.1f} MiB" for way, peak in peaks.items()},
        )
        assert written > 40 * 2**20
        assert max(peaks.values()) <= LIMIT * written, (rank, written, peaks)
