"""Sequences of a saved mini-batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.transfer import encode_samples
from megatron_rl.checkpoint.batches.bundle_sequences import (
    BundleError,
    SavedSequences,
    rank_name,
    replica_name,
)
from megatron_rl.replay.layout import RankLayout
from tests.unit.batch.rollouts import make_rollout

LAYERS, K, EXPERTS = 2, 4, 384


def test_what_r2_recorded_of_many_experts_has_one_type(tmp_path):
    """In another layout all sequences share micro-batches, also one without an id above 255."""
    lengths = [6, 7]
    samples = [
        Sample(make_rollout(str(n), 3, n - 3, layers=LAYERS, top_k=K, num_experts=EXPERTS), 0.5)
        for n in lengths
    ]
    ids = torch.arange(K).repeat(LAYERS, sum(lengths), 1).short()
    ids[:, lengths[0] :] += 256
    rows = torch.arange(sum(lengths))
    without = {"missing_routes": np.array([True] + [False] * 4), "routes_digest": bytes(8)}
    samples[0] = replace(samples[0], rollout=replace(samples[0].rollout, **without))
    encoded = torch.from_numpy(encode_samples(samples))
    save_file({"0:samples": encoded, "0:rows": torch.tensor(lengths)}, tmp_path / replica_name(0))
    place = torch.tensor([0, *range(LAYERS)])
    saved = {"place": place, "0:model_rows": rows, "0:router_rows": rows.clone(), "0:recorded": ids}
    save_file(saved, tmp_path / rank_name(0))
    rollouts = [
        sample.rollout for sample in SavedSequences(tmp_path, 1, 1).samples(with_record=True)
    ]
    for rollout in rollouts:
        assert rollout.missing_routes is None, "all were recorded"
        assert rollout.routes_digest == replace(rollout, routes_digest=None).routes_digest, (
            "of the recorded ones"
        )
    found = [rollout.routed_experts for rollout in rollouts]
    layout = RankLayout(
        (0, 1), 0, 1, sequence_parallel=False, num_experts=EXPERTS, top_k=K, ep_size=1
    )
    local = layout.local_routes(found, torch.tensor([0, *np.cumsum(lengths)]))
    last = np.cumsum(lengths) - 1
    expected = ids.numpy().copy()
    expected[:, last] = 0  # they route live
    assert np.array_equal(local, expected) and local.dtype == np.int16


def write_replica(folder, replica, micro_batches):
    """micro_batches: of each, its samples and the rows of each and of pads."""
    tensors = {}
    for number, (samples, rows) in enumerate(micro_batches):
        tensors[f"{number}:samples"] = torch.from_numpy(encode_samples(samples))
        tensors[f"{number}:rows"] = torch.tensor(rows)
    save_file(tensors, folder / replica_name(replica))


def test_the_rows_of_a_sequence_are_put_together_from_all_ranks(tmp_path):
    """Two ranks share the rows of replica 0, and each has the routers of one layer; a prompt was
    drawn twice.
    """
    a, b, c = (
        Sample(make_rollout(name, 2, size - 2, layers=2, top_k=K), 0.5)
        for name, size in zip("abc", (5, 4, 3), strict=True)
    )
    write_replica(tmp_path, 0, [([a, b], [6, 4, 2]), ([a], [5])])
    write_replica(tmp_path, 1, [([c], [3])])
    sizes = {(0, 0): 12, (0, 1): 5, (1, 0): 3}
    for rank, (replica, layers, rows) in enumerate(
        [(0, [0], slice(0, 12, 2)), (0, [1], slice(1, 12, 2)), (1, [0, 1], slice(0, 2))]
    ):
        values = {"place": torch.tensor([replica, *layers])}
        for number in (0, 1) if replica == 0 else (0,):
            size = sizes[replica, number]
            numbers = torch.arange(size)[rows].clone()
            values[f"{number}:model_rows"] = numbers
            # all but the last, for this rank's layers
            values[f"{number}:router_rows"] = torch.arange(size - 1)
            values[f"{number}:logprobs"] = 100.0 * replica + 50.0 * number + numbers
            ids = torch.arange((size - 1) * K).view(size - 1, K) + 1
            values[f"{number}:router_ids"] = torch.stack([ids + 1000 * layer for layer in layers])
        save_file(values, tmp_path / rank_name(rank))
    saved = SavedSequences(tmp_path, replicas=2, ranks=3)
    samples = saved.samples(with_record=False)
    assert [
        (sample.rollout.id, sample.advantage, len(sample.rollout.tokens)) for sample in samples
    ] == [
        ("a", 0.5, 5),
        ("b", 0.5, 4),
        ("a@2", 0.5, 5),
        ("c", 0.5, 3),
    ]
    expected = {
        "a": [0, 1, 2, 3, 4],
        "b": [6, 7, 8, 9],
        "a@2": [50, 51, 52, 53, 54],
        "c": [100, 101, 0],
    }
    assert {name: saved.values(name, "logprobs").tolist() for name in expected} == expected, (
        "rows that no rank has are 0"
    )
    for layer in (0, 1):
        ids = saved.values("b", f"router_ids {layer}")
        assert ids.tolist() == [
            [1000 * layer + 1 + row * K + k for k in range(K)] for row in (6, 7, 8, 9)
        ]
        assert saved.values("a@2", f"router_ids {layer}")[-1].tolist() == [0] * K
    blank = saved.blank("router_ids 1", 7)
    assert blank.shape == (7, K) and blank.dtype == torch.int64 and not blank.any()
    assert saved.blank("logprobs", 3).tolist() == [0.0] * 3
    assert saved.values("a", "reference") is None and saved.blank("reference", 3) is None
    with pytest.raises(
        BundleError, match="^rollout a: no recorded experts; replay.mode = R2 needs them$"
    ):
        saved.samples(with_record=True)
