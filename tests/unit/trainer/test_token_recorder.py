"""Recording tokens makes no router call and no loss wait for the device; see
tests/unit/replay/test_no_sync.py.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.batch.pack import pack
from megatron_rl.engine.pass_results import UpdateTokens
from megatron_rl.loss import PolicyLoss
from megatron_rl.records.packed import Sample
from megatron_rl.replay.layout import RankLayout
from megatron_rl.trainer.recording.token_recorder import Part
from tests.unit.batch.rollouts import make_rollout
from tests.unit.replay.test_no_sync import DEVICES

LAYERS, E, K = 2, 8, 2


def make_part(device, samples, batch):
    layout = RankLayout(
        layers=(1, 3),
        tp_rank=0,
        tp_size=1,
        sequence_parallel=False,
        num_experts=E,
        top_k=K,
        ep_size=1,
    )
    parallel = SimpleNamespace(device=torch.device(device))
    engine = SimpleNamespace(
        layout=layout, manager=SimpleNamespace(id_dtype=torch.uint8), parallel=parallel
    )
    return Part(engine, batch, samples)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_read_from_the_device(device):
    samples = [Sample(make_rollout(str(k), 2, 3 + k), 1.0, save_tokens=k == 1) for k in range(3)]
    batch = pack(samples)
    rows = batch.num_tokens
    part = make_part(device, samples, batch)
    moved = {
        name: getattr(batch, name).to(device)
        for name in ("rollout_logprobs", "sequence_ids", "loss_mask")
    }
    values, mask = (
        torch.zeros(rows, device=device),
        torch.ones(rows, dtype=torch.bool, device=device),
    )
    loss = PolicyLoss(values, values, mask, *[values] * 3, *[mask] * 6)
    tokens = UpdateTokens(0, SimpleNamespace(**moved), values, values, values, loss, values)
    ids = torch.zeros(rows, K, dtype=torch.int64, device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(LAYERS):
            part.add_routes(layer, ids, values, mask)
        part.add_flips(values, mask)
        part.add_tokens(tokens)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert part.own_experts.shape == (LAYERS, len(samples[1].rollout.tokens) - 1, K)
    assert part.values.shape == (7, samples[1].rollout.response_length) and part.sums.shape == (
        4,
        9,
    )


def test_only_chosen_rows_are_kept_and_every_sequence_is_summed():
    samples = [Sample(make_rollout(str(k), 2, 3 + k), 1.0, save_tokens=k == 1) for k in range(3)]
    batch = pack(samples)
    part = make_part("cpu", samples, batch)
    first = len(samples[0].rollout.tokens)
    row = torch.arange(batch.num_tokens)
    part.add_routes(0, row[:, None].expand(-1, K), row.float(), row % 2 == 0)
    assert part.own_experts[0, :, 0].tolist() == list(
        range(first, first + len(samples[1].rollout.tokens) - 1)
    )
    assert part.margins[0].tolist() == part.own_experts[0, :, 0].tolist()
    assert not part.own_experts[1].any() and not part.margins[1].any(), "the other layer"
    part.add_flips(torch.ones_like(row), torch.ones_like(row, dtype=torch.bool))
    assert part.sums[:3, -2].tolist() == [len(sample.rollout.tokens) for sample in samples]
    assert part.sums[:3, -1].tolist() == [LAYERS * len(sample.rollout.tokens) for sample in samples]


def test_summaries_values_and_flags_are_of_the_loss():
    """Against a loop over the tokens; pads and tokens outside the loss count nowhere."""
    samples = [Sample(make_rollout(str(k), 2, 3 + k), 1.0, save_tokens=k == 1) for k in range(3)]
    batch = pack(samples, [*(len(sample.rollout.tokens) for sample in samples), 3])
    part, rows = make_part("cpu", samples, batch), batch.num_tokens
    random = torch.Generator().manual_seed(0)
    old, new, entropy, shares, weight, ratio = (
        torch.randn(rows, generator=random) for _ in range(6)
    )
    names = (
        "mask",
        "clipped_high",
        "clipped_low",
        "bounded",
        "in_weight_mask",
        "rejected",
        "loss_mask",
    )
    where = {name: torch.rand(rows, generator=random) < 0.5 for name in names}
    loss_mask = where.pop("loss_mask")
    micro_batch = SimpleNamespace(
        rollout_logprobs=torch.randn(rows, generator=random),
        sequence_ids=batch.sequence_ids,
        loss_mask=loss_mask,
    )
    loss = SimpleNamespace(weight=weight, ratio=ratio, **where)
    part.add_tokens(UpdateTokens(0, micro_batch, new, old, entropy, loss, shares))
    sums, maxima = torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    flags = torch.zeros(rows)
    for row, number in enumerate(batch.sequence_ids.tolist()):
        is_in = bool(where["mask"][row])
        clipped = bool(where["clipped_high"][row] or where["clipped_low"][row])
        known = [
            where["clipped_high"][row], where["clipped_low"][row], where["bounded"][row],
            is_in and not where["in_weight_mask"][row], where["rejected"][row],
            loss_mask[row] and not is_in,
        ]  # fmt: skip
        flags[row] = sum(2**bit for bit, is_set in enumerate(known) if is_set)
        if number < 0:
            continue
        gap = is_in * (old[row].double() - micro_batch.rollout_logprobs[row].double())
        stale = is_in * (new[row].double() - old[row].double())
        terms = [
            is_in,
            -gap,
            gap.exp() - 1 - gap,
            clipped,
            is_in * weight[row],
            is_in * entropy[row],
            shares[row],
        ]
        sums[number] += torch.tensor([float(term) for term in terms], dtype=torch.float64)
        maxima[number] = torch.maximum(maxima[number], torch.stack([gap.abs(), stale.abs()]))
    torch.testing.assert_close(part.sums[:3, :-2], sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.maxima[:3], maxima, rtol=1e-12, atol=1e-12)
    first = batch.cu_seqlens[1] + samples[1].rollout.prompt_length - 1
    chosen = slice(int(first), int(first) + samples[1].rollout.response_length)
    columns = (old, new, torch.where(where["mask"], weight, 0.0), ratio, entropy, shares, flags)
    assert (
        torch.equal(part.values, torch.stack(columns)[:, chosen])
        and part.values.dtype == torch.float32
    )
