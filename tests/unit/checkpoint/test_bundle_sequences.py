"""Sequences of a saved mini-batch."""

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.transfer import encode_samples
from megatron_rl.checkpoint.bundle_sequences import SavedSequences, rank_name, replica_name
from megatron_rl.replay.layout import RankLayout
from tests.unit.batch.rollouts import make_rollout

LAYERS, K, EXPERTS = 2, 4, 384


def test_what_r2_recorded_of_many_experts_has_one_type(tmp_path):
    """In another layout all sequences share micro-batches, also one without an id above 255."""
    lengths = [6, 7]
    samples = [
        Sample(make_rollout(str(n), 3, n - 3, layers=LAYERS, top_k=K, num_experts=EXPERTS), 0.5) for n in lengths
    ]
    ids = torch.arange(K).repeat(LAYERS, sum(lengths), 1).short()
    ids[:, lengths[0] :] += 256
    rows = torch.arange(sum(lengths))
    encoded = torch.from_numpy(encode_samples(samples))
    save_file({"0:samples": encoded, "0:rows": torch.tensor(lengths)}, tmp_path / replica_name(0))
    place = torch.tensor([0, *range(LAYERS)])
    saved = {"place": place, "0:model_rows": rows, "0:router_rows": rows.clone(), "0:recorded": ids}
    save_file(saved, tmp_path / rank_name(0))
    found = [sample.rollout.routed_experts for sample in SavedSequences(tmp_path, 1, 1).samples(with_record=True)]
    layout = RankLayout((0, 1), 0, 1, sequence_parallel=False, num_experts=EXPERTS, top_k=K, ep_size=1)
    local = layout.local_routes(found, torch.tensor([0, *np.cumsum(lengths)]))
    last = np.cumsum(lengths) - 1
    expected = ids.numpy().copy()
    expected[:, last] = 0  # they route live
    assert np.array_equal(local, expected) and local.dtype == np.int16
