"""Every metric against plain float64 loops over random micro-batches; edge cases; no wait for the
device.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_rl.distributed  # noqa: F401  (CPU support first)
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.engine.statistics import (
    AGE_GROUPS,
    FLIP_GROUPS,
    add_divergence,
    add_old_pass,
    add_update,
    add_update_pass,
    group_of,
    pass_tokens,
)
from megatron_rl.metrics.histogram import HISTOGRAMS
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout
from megatron_rl.records.packed import RowState
from megatron_rl.trainer.rollout_metrics import derived
from tests.unit.metrics.test_histogram import by_numpy

AGE_OF = {0: "age_0", 1: "age_1", 2: "age_2_3", 3: "age_2_3", 4: "age_4_up", 9: "age_4_up"}
VERSION = 9
GROUP_OF = {
    0: "flips_0",
    1: "flips_1",
    2: "flips_2_3",
    3: "flips_2_3",
    4: "flips_4_7",
    7: "flips_4_7",
    8: "flips_8_up",
}


def make_micro_batches(rng, counts=(3, 1, 2), sequence_multiple=1):
    """Packed micro-batches of random responses, pads at the end and, under a multiple, inside the
    sequences.
    """
    batches = []
    for number, count in enumerate(counts):
        samples = []
        for index in range(count):
            prompt, size = int(rng.integers(1, 5)), int(rng.integers(6, 20))
            logprobs = rng.normal(-2, 1, size - prompt).astype(np.float32)
            name = f"{number}.{index}"
            routes, missing = np.zeros((size - 1, 1, 1), np.uint8), rng.random(size - 1) < 0.1
            tokens = rng.integers(0, 9, size)
            versions = np.sort(VERSION - rng.choice(list(AGE_OF), size - prompt)).astype(np.int32)
            rollout = Rollout(
                name, tokens, prompt, logprobs, routes, "stop", versions, missing_routes=missing
            )
            samples.append(Sample(rollout, float(rng.normal())))
        rule = PackRule(sequence_multiple=sequence_multiple)
        batches.append(
            pack(
                samples,
                [*(rule.sequence_rows(len(sample.rollout.tokens)) for sample in samples), 4],
            )
        )
    return batches


def brute_force(gap_of, batches, flips, mini_batch):
    """name -> the values it is a statistic of, from Python loops; gap_of: name -> per micro-batch
    log-ratios.
    """
    found = {}
    for name, gaps in gap_of.items():
        by_response, kind = {}, name.split("/")[1]
        for batch, values, flipped in zip(batches, gaps, flips, strict=True):
            for row in range(batch.num_tokens):
                x = float(values[row])
                if not batch.loss_mask[row] or not math.isfinite(x):
                    continue
                by_response.setdefault((id(batch), int(batch.sequence_ids[row])), []).append(x)
                has_route = int(batch.row_state[row]) == RowState.REPLAYED
                by_flips = [f"/{GROUP_OF[int(flipped[row])]}"] if has_route else ["/no route"]
                by_age = f"/{AGE_OF[VERSION - int(batch.policy_versions[row])]}"
                for group in ("", f"/mini_batch_{mini_batch}", *by_flips, by_age):
                    found.setdefault((f"logratio/{kind}", group), []).append(x)
        for xs in by_response.values():
            product = math.prod(math.exp(x) for x in xs)
            for group in ("", f"/mini_batch_{mini_batch}"):
                rest = abs(product - 1 - sum(math.exp(x) - 1 for x in xs))
                found.setdefault((f"first_order/{kind}", group), []).append(rest)
    return found


def test_every_metric_equals_loops_over_tokens_and_responses():
    rng = np.random.default_rng(0)
    sums, expected = MetricSums(), {}
    for mini_batch in range(2):
        batches = make_micro_batches(rng, sequence_multiple=(1, 4)[mini_batch])
        noises = [
            [torch.tensor(rng.normal(0, scale, batch.num_tokens)) for batch in batches]
            for scale in (0.5, 0.2)
        ]
        old = [(b.rollout_logprobs + n).float() for b, n in zip(batches, noises[0], strict=True)]
        new = [(o + n).float() for o, n in zip(old, noises[1], strict=True)]
        old[0][batches[0].loss_mask.nonzero()[0]] = math.nan
        new[1][batches[1].loss_mask.nonzero()[2]] = -math.inf
        flips = [
            torch.tensor(rng.choice(list(GROUP_OF), b.num_tokens), dtype=torch.uint8)
            for b in batches
        ]
        tokens = pass_tokens(
            batches, flips, mini_batch=mini_batch, cp_group=None, policy_version=VERSION
        )
        add_old_pass(sums, tokens, torch.cat(old))
        add_update_pass(sums, tokens, torch.cat(new), torch.cat(old))
        mu = [b.rollout_logprobs.double() for b in batches]
        train_infer = [o.double() - m for o, m in zip(old, mu, strict=True)]
        staleness = [n.double() - o.double() for n, o in zip(new, old, strict=True)]
        # NaN where any of the three is
        total = [n.double() - m + 0 * o for n, m, o in zip(new, mu, old, strict=True)]
        pieces = brute_force({"x/train_infer": train_infer}, batches, flips, mini_batch)
        pieces |= brute_force(
            {"x/staleness": staleness, "x/total": total}, batches, flips, mini_batch
        )
        for key, values in pieces.items():
            expected.setdefault(key, []).extend(values)
    got = sums.reduce(None, "cpu")
    without = len(expected["logratio/train_infer", "/no route"])
    assert 0 < without < 20
    expected = {key: values for key, values in expected.items() if key[1] != "/no route"}
    for (name, group), values in expected.items():
        for statistic in HISTOGRAMS.get(name, ()):  # logratio/total is not reported
            reported, exact = (
                got.pop(f"{name}_{statistic}{group}"),
                by_numpy(np.array(values), statistic),
            )
            is_quantile = statistic in ("median", "p95", "p99")
            assert reported == pytest.approx(
                exact, rel=0.0182 if is_quantile else 1e-9, abs=1e-12
            ), (name, statistic)
    gaps = np.array(expected["logratio/train_infer", ""])
    assert got.pop("train/kl_mu_pi") == pytest.approx(-gaps.mean())
    assert got.pop("train/kl_mu_pi_k3") == pytest.approx((np.exp(gaps) - 1 - gaps).mean())
    assert got.pop("train/logratio_abs_mean") == pytest.approx(np.abs(gaps).mean())
    assert got.pop("train/logratio_abs_max") == np.abs(gaps).max()
    for tau in (2, 5):
        rho = np.exp(gaps)
        assert got.pop(f"logratio/f{tau}_frac") == pytest.approx(
            np.mean(np.maximum(rho, 1 / rho) > tau)
        )
    for group in FLIP_GROUPS:
        share = len(expected["logratio/train_infer", f"/{group}"]) / (len(gaps) - without)
        assert got.pop(f"logratio/share/{group}") == pytest.approx(share)
    for group in AGE_GROUPS:
        share = len(expected["logratio/train_infer", f"/{group}"]) / len(gaps)
        assert got.pop(f"logratio/share/{group}") == pytest.approx(share)
    assert got == {}


def test_weights_and_clipping_by_age_equal_loops_over_tokens():
    rng = np.random.default_rng(5)
    sums, weights, clips, floors, penalties = MetricSums(), {}, {}, [], {0: [], 3: []}
    for number, batch in zip((0, 3, 3), make_micro_batches(rng), strict=True):
        size = batch.num_tokens
        mask = batch.loss_mask & torch.tensor(rng.random(size) < 0.9)
        weight = torch.tensor(rng.random(size))
        high, low = (torch.tensor(rng.random(size) < share) & mask for share in (0.2, 0.4))
        low &= ~high
        nothing = torch.zeros(size, dtype=torch.bool)
        penalised = torch.tensor(rng.random(size) < 0.5) & high
        loss = SimpleNamespace(
            penalty_tokens=high, penalised=penalised,
            mask=mask, ratio=weight, is_weight=weight, bounded=nothing, clipped_high=high,
            clipped_low=low, rejected=nothing,
            in_weight_mask=mask, selected=nothing, gate=None, trust=weight, at_floor=low, kl=None,
        )  # fmt: skip
        found = SimpleNamespace(entropy=weight, kept_entropy=None, log_mass=None)
        add_update(sums, torch.zeros(()), 3, loss, found, batch, VERSION, number)
        penalties[number] += penalised[high].tolist()
        for row in mask.nonzero().flatten().tolist():
            group = AGE_OF[VERSION - int(batch.policy_versions[row])]
            weights.setdefault(group, []).append(float(weight[row]))
            clips.setdefault(group, []).append(bool(high[row] or low[row]))
            floors.append(bool(low[row]))
    got = derived(sums.reduce(None, "cpu"))
    assert weights.keys() == AGE_GROUPS.keys()
    every = [w for part in weights.values() for w in part]
    assert got["train/ess"] == pytest.approx(
        sum(every) ** 2 / (len(every) * sum(w**2 for w in every))
    )
    assert 0 < got["train/penalty_frac/mini_batch_0"] == pytest.approx(np.mean(penalties[0]))
    assert 0 < got["train/penalty_frac/mini_batch_3"] == pytest.approx(np.mean(penalties[3]))
    assert got["train/router_trust_mean"] == pytest.approx(
        np.mean([w for part in weights.values() for w in part])
    )
    assert 0 < got["train/router_floor_frac"] == pytest.approx(np.mean(floors))
    for group in AGE_GROUPS:
        assert got[f"train/is_weight_mean/{group}"] == pytest.approx(np.mean(weights[group]))
        assert got[f"train/clip_frac/{group}"] == pytest.approx(np.mean(clips[group]))


def test_tiny_gaps_are_not_rounded_away():
    """k3 of gaps near 1e-4 is 5e-9, and the first-order rest of such a response about the same:
    float32 has neither.
    """
    batch = make_micro_batches(np.random.default_rng(1), counts=(1,))[0]
    batch = replace(batch, rollout_logprobs=torch.zeros(batch.num_tokens))
    gap = 2.0**-13
    sums = MetricSums()
    tokens = pass_tokens([batch], None, mini_batch=0, cp_group=None)
    add_old_pass(sums, tokens, torch.full((batch.num_tokens,), gap))
    got, count = sums.reduce(None, "cpu"), int(batch.loss_mask.sum())
    assert got["train/kl_mu_pi_k3"] == pytest.approx(gap**2 / 2, rel=1e-4)
    rest = math.expm1(count * gap) - count * math.expm1(gap)
    assert got["first_order/train_infer_max"] == pytest.approx(rest, rel=1e-9)
    assert not any(
        name.startswith(("logratio/share", "logratio/train_infer_std/flips")) for name in got
    )  # flips not measured


@pytest.mark.parametrize("gap", [-80.0, 80.0, 5000.0])
def test_extreme_log_ratios_stay_finite(gap):
    batch = make_micro_batches(np.random.default_rng(2), counts=(2,))[0]
    tokens = pass_tokens([batch], None, mini_batch=0, cp_group=None)
    sums = MetricSums()
    add_old_pass(sums, tokens, batch.rollout_logprobs + gap)
    got = sums.reduce(None, "cpu")
    assert (
        got["logratio/train_infer_mean"] == pytest.approx(gap, rel=1e-5)
        and got["logratio/f5_frac"] == 1.0
    )
    names = [name for name in got if name.startswith(("first_order/", "logratio/"))]
    assert names and all(math.isfinite(got[name]) for name in names)
    if gap < 0:  # the product is 0, so the rest is T - 1
        lengths = [int((batch.loss_mask & (batch.sequence_ids == i)).sum()) for i in range(2)]
        assert got["first_order/train_infer_max"] == pytest.approx(max(lengths) - 1)


def test_a_response_without_a_finite_token_does_not_count():
    batch = make_micro_batches(np.random.default_rng(3), counts=(2,))[0]
    old = torch.where(batch.sequence_ids == 0, math.nan, batch.rollout_logprobs + 0.5)
    sums = MetricSums()
    add_old_pass(sums, pass_tokens([batch], None, mini_batch=0, cp_group=None), old)
    got = sums.reduce(None, "cpu")
    count = int((batch.loss_mask & (batch.sequence_ids == 1)).sum())
    expected = math.exp(0.5 * count) - 1 - count * math.expm1(0.5)
    assert got["first_order/train_infer_median"] == pytest.approx(expected, rel=0.0182)
    assert got["first_order/train_infer_max"] == pytest.approx(expected, rel=1e-5)


def test_a_token_that_is_not_finite_is_in_no_mean_over_the_teachers_tokens():
    """The loss leaves such a token out; the empty one is not taught."""
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    teacher = torch.tensor([0.5, 0.3, 0.6, 0.2, math.nan, 0.2]).log()
    student = torch.tensor([0.4, 0.3, 0.5, 0.1, math.nan, math.inf]).log()
    sets = SimpleNamespace(rows=rows, is_empty=torch.tensor([False, False, False, True]))
    top = SimpleNamespace(sets=sets, logprobs=teacher)
    sums = MetricSums()
    add_divergence(
        sums,
        torch.tensor([0.1, 0.2, math.nan, 0.0]),
        SimpleNamespace(top=student),
        SimpleNamespace(top=top),
        SimpleNamespace(mask=torch.tensor([True, True, False, True])),
    )
    assert sums.reduce(None, "cpu") == {
        "teacher/divergence": pytest.approx(0.15),
        "teacher/top_mass_student": pytest.approx(0.65),
        "teacher/top_mass_teacher": pytest.approx(0.8),
    }


def test_flip_groups():
    names = list(FLIP_GROUPS)
    found = {
        flips: names[group_of(torch.tensor([flips], dtype=torch.uint8), FLIP_GROUPS)]
        for flips in GROUP_OF
    }
    assert found == GROUP_OF


def test_they_never_wait_for_the_device():
    """Tensors without storage refuse every read of a value."""
    real = make_micro_batches(np.random.default_rng(4))
    batches = [
        replace(b, **{k: v.to("meta") for k, v in vars(b).items() if isinstance(v, torch.Tensor)})
        for b in real
    ]
    flips = [torch.empty(b.num_tokens, dtype=torch.uint8, device="meta") for b in batches]
    tokens = pass_tokens(batches, flips, mini_batch=1, cp_group=None)
    values = torch.empty(sum(b.num_tokens for b in batches), device="meta")
    add_old_pass(MetricSums(), tokens, values)
    add_update_pass(MetricSums(), tokens, values, values)
