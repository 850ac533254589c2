"""Positions of the switches that no preset has, metrics of tokens without advantage, and what a
user's loss is given.
"""

import math

import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.loss import LossConfig, LossInputs, Sequences
from megatron_rl.loss.custom import check_loss
from megatron_rl.loss.kl import kl_to_reference
from megatron_rl.loss.ratios import ratio_of
from tests.thread_ranks import run_thread_ranks
from tests.unit.loss.cases import Response, counts, loss_of, pack, responses, run, run_whole


def one(logp, old, mu, a):
    return Response(*(torch.tensor([v], dtype=torch.float64) for v in (logp, old, mu)), a)


@pytest.mark.parametrize("form", ["logp", "ratio"])
@pytest.mark.parametrize("seed", range(4))
def test_a_clip_anchored_at_the_rollout_bounds_pi_over_mu(form, seed):
    """Token by token: M_t and, in form ratio, the clipped value come from pi/mu; pi_old has no
    effect.
    """
    batch = responses(seed)
    config = loss_of(
        "minirl",
        form=form,
        clip_anchor="rollout",
        weight="none",
        weight_mode="none",
        weight_high=None,
    )
    total, gradients = run_whole(batch, config)
    expected = 0.0
    for r, gradient in zip(batch, gradients, strict=True):
        for x, mu, slope in zip(r.logprobs.tolist(), r.mu.tolist(), gradient.tolist(), strict=True):
            q, a = math.exp(x - mu), r.advantage
            dropped = (a > 0 and q > 1.27) or (a < 0 and q < 0.8)
            f = (
                (0.0 if dropped else x)
                if form == "logp"
                else min(max(q, 0.8), 1.27)
                if dropped
                else q
            )
            expected -= a * f / len(batch)
            expected_slope = 0.0 if dropped else -a * (1.0 if form == "logp" else q) / len(batch)
            assert slope == pytest.approx(expected_slope, rel=1e-10, abs=1e-14)
    assert float(total) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("clip", ["tv", "kl"])
@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_divergences_of_either_anchor(clip, anchor):
    """Every token of random batches: dropped where the divergence from the anchor is beyond the
    bound of its side.
    """
    config = loss_of("dppo", clip=clip, clip_anchor=anchor, clip_low=0.02, clip_high=0.05)
    dropped = {True: 0, False: 0}
    for seed in range(4):
        batch = responses(seed)
        packed = pack(batch)
        _, _, loss = run(packed, config, **counts(batch))
        for r, rows in zip(batch, packed.rows, strict=True):
            anchors = r.old if anchor == "old" else r.mu
            got = zip(
                loss.clipped_high[rows].tolist(), loss.clipped_low[rows].tolist(), strict=True
            )
            for x, b, (high, low) in zip(r.logprobs.tolist(), anchors.tolist(), got, strict=True):
                p, q = math.exp(x), math.exp(b)
                kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                divergence = abs(p - q) if clip == "tv" else kl
                assert high == (r.advantage > 0 and p > q and divergence > 0.05)
                assert low == (r.advantage < 0 and p < q and divergence > 0.02)
                dropped[high or low] += 1
    assert min(dropped.values()) > 5


@pytest.mark.parametrize("clip", ["tv", "kl"])
def test_a_divergence_exactly_at_its_bound_is_kept_and_an_equal_token_has_none(clip):
    far = loss_of("dppo", clip=clip, clip_low=0.0, clip_high=0.0)
    for a in (1.0, -1.0):
        _, _, loss = run(pack(batch := [one(-1.0, -9.0, -1.0, a)]), far, **counts(batch))
        assert not (loss.clipped_high | loss.clipped_low).any()
    if clip == "tv":
        half, quarter = math.log(0.5), math.log(0.25)
        bound = abs(math.exp(half) - math.exp(quarter))
        at = loss_of("dppo", clip=clip, clip_low=bound, clip_high=bound)
        for batch in ([one(half, -9.0, quarter, 1.0)], [one(quarter, -9.0, half, -1.0)]):
            _, _, loss = run(pack(batch), at, **counts(batch))
            assert not (loss.clipped_high | loss.clipped_low).any()


@pytest.mark.parametrize("bound", [0.5, 10.0])
def test_the_divergence_of_a_certain_token_is_finite(bound):
    """1 - pi = 0, or 1 - mu = 0: its logarithm is bounded by that of 1e-8."""
    config = loss_of("dppo", clip="kl", clip_low=bound, clip_high=bound)
    for logp, mu, a in [(0.0, math.log(0.5), 1.0), (math.log(0.5), 0.0, -1.0)]:
        _, _, loss = run(pack(batch := [one(logp, -9.0, mu, a)]), config, **counts(batch))
        p, q = math.exp(logp), math.exp(mu)
        divergence = q * (mu - logp) + max(1 - q, 1e-8) * (
            math.log(max(1 - q, 1e-8)) - math.log(max(1 - p, 1e-8))
        )
        assert bool((loss.clipped_high | loss.clipped_low).any()) == (divergence > bound)


def test_rejection_by_the_product_is_not_that_by_the_mean():
    """Three tokens of pi_old/mu = 1.2: mean 1.2 is inside [0.5, 1.5], product 1.728 is not."""
    x = torch.full((3,), math.log(1.2), dtype=torch.float64) - 1
    batch = [Response(x, x, torch.full_like(x, -1.0), 1.0)]
    for level, rejected in (("geometric", False), ("product", True)):
        config = loss_of("geo_rs", reject_low=0.5, reject_high=1.5, reject_level=level)
        _, _, loss = run(pack(batch), config, **counts(batch))
        assert bool(loss.rejected.any()) == rejected


def test_a_token_without_advantage_counts_as_nothing():
    """A = 0: neither clipped, on either side, nor beyond dual_clip, nor rejected as a negative
    one.
    """
    for logp in (2.0, -2.0):
        batch = [one(logp, 0.0, 0.0, 0.0)]
        for name, switches in [
            ("minirl", {}),
            ("grpo", {"dual_clip": 3.0}),
            ("opsm", {}),
            ("dppo", {}),
        ]:
            _, _, loss = run(pack(batch), loss_of(name, **switches), **counts(batch))
            assert not (loss.clipped_high | loss.clipped_low | loss.rejected).any(), (name, logp)


@pytest.mark.parametrize("a", [0.4, -0.4])
def test_small_advantages_are_clipped_by_their_sign(a):
    """|A| < 1, as mean-centred rewards have it: the same tokens as for |A| > 1, in every way of
    dropping.
    """
    for logp in (1.5, 0.1, -0.1, -1.5):
        for name, switches in [
            ("minirl", {}),
            ("grpo", {"dual_clip": 3.0}),
            ("opsm", {}),
            ("dppo", {}),
        ]:
            found = []
            for scale in (1.0, 5.0):
                batch = [one(logp - 2.0, -2.0, -2.0, a * scale)]
                _, gradient, loss = run(pack(batch), loss_of(name, **switches), **counts(batch))
                marks = [
                    bool(m.any()) for m in (loss.clipped_high, loss.clipped_low, loss.rejected)
                ]
                found.append((marks, pytest.approx((gradient / scale).tolist(), rel=1e-12)))
            assert found[0][0] == found[1][0] and found[0][1].expected == found[1][1], (name, logp)


def test_a_ratio_exactly_at_dual_clip_is_inside():
    at = float(
        ratio_of(torch.tensor([1.1], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
    )
    _, gradient, loss = run(
        pack(batch := [one(1.1, 0.0, 0.0, -1.0)]), loss_of("grpo", dual_clip=at), **counts(batch)
    )
    assert not loss.clipped_high.any() and float(gradient.sum()) == pytest.approx(at)


@pytest.mark.parametrize(
    "aggregation", ["sequence_sum", "sequence_mean", "token_mean", "kept_mean"]
)
def test_one_token_is_divided_by_one(aggregation):
    total, gradients = run_whole(
        [one(-0.5, -0.5, -0.5, 2.0)], loss_of("reinforce", aggregation=aggregation)
    )
    assert float(total) == 1.0 and float(gradients[0]) == -2.0


def test_ratios_carry_no_gradient():
    """As numbers for the metrics too: they would keep the graph of the pass alive."""
    x, old = (torch.full((3,), v, requires_grad=True) for v in (-1.0, -2.0))
    assert (
        not ratio_of(x, old.detach()).requires_grad and not ratio_of(x.detach(), old).requires_grad
    )


def test_only_a_mask_removes_tokens_from_the_denominator():
    """Weights of e^2 beyond weight_high = 5: truncated and clipped tokens stay in it, masked ones
    leave it.
    """
    batch = [one(-1.0, -1.0, -3.0, 1.0), one(-1.0, -1.0, -1.0, 1.0)]
    for mode, left in (("truncate", 2), ("clip", 2), ("mask", 1)):
        packed = pack(batch)
        _, _, loss = run(packed, loss_of("minirl", weight_mode=mode), **counts(batch))
        assert int(loss.in_weight_mask.sum()) == left and int(loss.bounded.sum()) == 1, mode


# KL -----------------------------------------------------------------------------------------------


def test_far_references_are_clamped_at_20():
    for x in (50.0, -50.0):
        held = math.copysign(20.0, x)
        for estimator, expected in (("k1", -held), ("k2", 200.0), ("k3", math.expm1(held) - held)):
            got = kl_to_reference(
                torch.tensor([-60.0]).double(), torch.tensor([-60.0 + x]).double(), estimator
            )
            assert float(got) == pytest.approx(expected, rel=1e-12)


def test_no_gradient_reaches_the_reference():
    logprobs, reference = (torch.full((3,), v, requires_grad=True) for v in (-1.0, -2.0))
    kl_to_reference(logprobs, reference, "k3").sum().backward()
    assert logprobs.grad is not None and reference.grad is None


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="'k4' is unknown"):
        kl_to_reference(torch.zeros(1), torch.zeros(1), "k4")


# A user's loss ------------------------------------------------------------------------------------


def asks_for_its_inputs(inputs: LossInputs, config: LossConfig):
    assert config.name.endswith(":asks_for_its_inputs") and config.scale == 0.5
    columns = (inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs, inputs.advantages)
    assert [column.dtype for column in columns] == [torch.float64] * 4
    return -inputs.advantages * inputs.logprobs


def test_a_users_loss_is_given_its_configuration_and_one_dtype():
    """Advantages travel as float32; they join the log-probs' float64."""
    packed = pack(batch := responses(3))
    packed.advantages = packed.advantages.float()
    total, _, _ = run(
        packed, loss_of(f"{__name__}:asks_for_its_inputs", scale=0.5), **counts(batch)
    )
    given = packed.advantages.double()
    expected = -(given * packed.logprobs)[packed.mask].sum() / len(batch)
    assert float(total) == pytest.approx(0.5 * float(expected), rel=1e-12)


def test_a_users_loss_is_loaded_before_the_run():
    check_loss(loss_of("minirl"))
    check_loss(loss_of("examples.losses.sapo:sapo"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        check_loss(loss_of("examples.losses.sapo:sappo"))


# Sequences ----------------------------------------------------------------------------------------


def test_sums_carry_no_gradient_and_keep_the_type():
    sequences = Sequences.of(torch.tensor([0, 0, 1]), torch.tensor([True, True, False]))
    assert sequences.lengths.tolist() == [2, 2, 1] and sequences.lengths.dtype == torch.int64
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    got = sequences.sum(values)
    assert got.tolist() == [3.0, 3.0, 4.0] and got.dtype == torch.float32 and not got.requires_grad
    cancelling = Sequences.of(torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    assert cancelling.sum(torch.tensor([1e8, 1.0, -1e8])).tolist() == [1.0] * 3, (
        "added up in float64"
    )


def test_sums_run_over_the_ranks_that_share_a_response():
    """Two context ranks hold parts of both responses; pads are on one of them."""
    ids = [torch.tensor([0, 1, 1, -1]), torch.tensor([1, 0])]
    values = [torch.tensor([1.0, 2.0, 4.0, 99.0]), torch.tensor([8.0, 16.0])]

    def both(group, rank):
        sequences = Sequences(ids[rank], 2, torch.ones_like(ids[rank]), group)
        mask = values[rank] != 4.0
        return sequences.sum(values[rank]).tolist(), sequences.mean(values[rank], mask).tolist()

    first, second = run_thread_ranks(both, 2)
    assert first == ([17.0, 14.0, 14.0, 0.0], [8.5, 5.0, 5.0, 0.0])
    assert second == ([14.0, 17.0], [5.0, 8.5])
