"""The soft forms, the geometric mean of clipped tokens and the penalty: identities with their
neighbours, and their slopes.
"""

import math

import pytest
import torch

from megatron_rl.loss import PRESETS, LossInputs, policy_loss
from tests.unit.loss.cases import Response, counts, loss_of, pack, responses, run, run_whole

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def one(logp, old, mu, a):
    return Response(*(torch.tensor([v], dtype=torch.float64) for v in (logp, old, mu)), a)


def gradients(batch, config):
    return torch.cat(run_whole(batch, config)[1])


def on_policy(seed):
    return [
        Response(r.logprobs, r.logprobs.clone(), r.logprobs.clone(), r.advantage)
        for r in responses(seed)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_on_policy_every_ratio_loss_has_the_gradient_of_grpo(seed):
    batch = on_policy(seed)
    expected = gradients(batch, loss_of("grpo"))
    for name in ("sapo", "gmpo", "gspo", "drpo"):
        got = gradients(batch, loss_of(name, aggregation="sequence_mean"))
        torch.testing.assert_close(got, expected, **EXACT, msg=name)


def test_sapo_is_the_example_of_a_users_loss():
    for seed in range(4):
        batch = responses(seed)
        total, slopes = run_whole(batch, loss_of("sapo"))
        expected, expected_slopes = run_whole(
            batch, loss_of("examples.losses.sapo:sapo", aggregation="sequence_mean")
        )  # whose tau is a float32 number
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            torch.cat(slopes), torch.cat(expected_slopes), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(("a", "tau"), [(1.0, 2.0), (-1.0, 3.0)])
def test_the_slope_of_the_sigmoid_is_1_at_the_anchor_and_falls_on_both_sides(a, tau):
    config = loss_of("sapo", tau_positive=2.0, tau_negative=3.0)
    gates = []
    for r in (0.25, 1.0, 1.75):
        batch = [one(math.log(r), 0.0, -9.0, a)]
        _, gradient, loss = run(pack(batch), config, **counts(batch))
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        assert float(gradient.sum()) == pytest.approx(-a * 4 * s * (1 - s) * r, rel=1e-12)
        gates.append(float(loss.gate[loss.mask]))
        assert gates[-1] == pytest.approx(4 * s * (1 - s), rel=1e-12)
    assert gates[1] == 1.0 and gates[0] == pytest.approx(gates[2]) and gates[0] < 0.9


@pytest.mark.parametrize("seed", range(4))
def test_drpo_without_its_bound_is_minirl_without_truncation_and_clip(seed):
    far = gradients(responses(seed), loss_of("drpo", delta=1e15))
    torch.testing.assert_close(
        far, gradients(responses(seed), loss_of("minirl_no_clip", weight_high=math.inf)), **EXACT
    )


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize("seed", range(4))
def test_the_slope_of_drpo_is_table_1(seed, anchor):
    """Gradient = -A q (1 - sign(A (q - 1)) |pi - a| / delta): beyond delta it turns back."""
    batch = responses(seed)
    packed, config = pack(batch), loss_of("drpo", delta=0.05, clip_anchor=anchor)
    _, gradient, loss = run(packed, config, **counts(batch))
    turned = 0
    for r, rows in zip(batch, packed.rows, strict=True):
        for row, x, b in zip(
            rows.tolist(),
            r.logprobs.tolist(),
            (r.old if anchor == "old" else r.mu).tolist(),
            strict=True,
        ):
            q = math.exp(x - b)
            sign = 0 if r.advantage == 0 else math.copysign(1, r.advantage * (q - 1))
            weight = 1 - sign * abs(math.exp(x) - math.exp(b)) / 0.05
            assert float(gradient[row]) == pytest.approx(
                -r.advantage * q * weight / len(batch), rel=1e-9, abs=1e-13
            )
            assert float(loss.gate[row]) == pytest.approx(weight, rel=1e-9, abs=1e-12)
            turned += weight < 0 and r.advantage != 0
    assert turned


def test_drpo_weighs_a_rare_token_by_its_probability_not_its_ratio():
    """The ratio is e^18; the probability moved by 0.05 of delta = 0.5."""
    batch = [one(math.log(0.05), 0.0, math.log(0.05) - 18, 1.0)]
    _, _, loss = run(pack(batch), loss_of("drpo", delta=0.5), **counts(batch))
    assert float(loss.gate[loss.mask]) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_without_a_clip_is_gspo_without_one(seed):
    batch = responses(seed)
    gmpo = loss_of("grpo", clip="none", form_level="geometric")
    gspo = loss_of("grpo", clip="none", clip_level="geometric")
    total, slopes = run_whole(batch, gmpo)
    expected, expected_slopes = run_whole(batch, gspo)
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(torch.cat(slopes), torch.cat(expected_slopes), **EXACT)


def test_gmpo_of_single_tokens_is_grpo_with_its_bounds():
    batch = [r for seed in range(6) for r in responses(seed, lengths=(1,) * 5)]
    bounds = {"clip_low": PRESETS["gmpo"].clip_low, "clip_high": PRESETS["gmpo"].clip_high}
    assert 1 - bounds["clip_low"] == pytest.approx(math.exp(-0.4)) and 1 + bounds[
        "clip_high"
    ] == pytest.approx(math.exp(0.4))
    torch.testing.assert_close(
        gradients(batch, loss_of("gmpo")), gradients(batch, loss_of("grpo", **bounds)), **EXACT
    )


def test_one_clipped_token_leaves_the_others_their_gradient():
    """Two tokens, r = 2 (held at 1.5) and 1.1, A > 0: both through sqrt(1.5 * 1.1); GSPO drops both
    or none.
    """
    x = torch.tensor([2.0, 1.1], dtype=torch.float64).log()
    batch = [Response(x, torch.zeros_like(x), torch.zeros_like(x), 1.0)]
    total, (slopes,) = run_whole(batch, loss_of("gmpo", clip_low=0.5, clip_high=0.5))
    mean = math.sqrt(1.5 * 1.1)
    assert float(total) == pytest.approx(-mean) and slopes.tolist() == [
        0.0,
        pytest.approx(-mean / 2),
    ]


@pytest.mark.parametrize("clip", ["tv", "kl"])
@pytest.mark.parametrize(
    ("penalty", "slope"), [("square", lambda x: 2 * x), ("abs", lambda x: math.copysign(1, x))]
)
@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_the_penalty_adds_to_every_token_whatever_dropped_it(clip, penalty, slope, anchor):
    """DPPO's tau with both divergences, on clipped, rejected and vetoed tokens and where A = 0."""
    settings = {
        "clip": clip, "clip_low": 0.02, "clip_high": 0.02, "clip_anchor": anchor,
        "reject": "staleness", "reject_high": 1.1, "veto": "total", "veto_high": 4.0,
    }  # fmt: skip
    batch = responses(2)
    packed = pack(batch)
    total, gradient, loss = run(packed, loss_of("dppo", **settings), **counts(batch))
    assert loss.rejected.any() and (loss.clipped_high | loss.clipped_low).any()
    with_it = loss_of("dppo", **settings, penalty=penalty, penalty_coef=0.25)
    new_total, new_gradient, _ = run(packed, with_it, **counts(batch))
    added = 0.0
    for r, rows in zip(batch, packed.rows, strict=True):
        for row, x, b in zip(
            rows.tolist(),
            r.logprobs.tolist(),
            (r.old if anchor == "old" else r.mu).tolist(),
            strict=True,
        ):
            acts = penalty == "square" or abs(x - b) > 0.01
            added += (
                0.25 * acts * ((x - b) ** 2 if penalty == "square" else abs(x - b)) / len(batch)
            )
            expected = 0.25 * acts * slope(x - b) / len(batch)
            assert float(new_gradient[row] - gradient[row]) == pytest.approx(
                expected, rel=1e-9, abs=1e-13
            )
    assert float(new_total - total) == pytest.approx(added, rel=1e-10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_dead_zone_of_the_penalty(sign):
    """Within it, bounds included, neither value nor slope; beyond it |log r| as it is, and its
    sign.
    """
    config = loss_of("reinforce", penalty="abs", penalty_coef=0.5, penalty_dead_zone=0.25)
    for distance, acts in [(0.0, 0), (0.125, 0), (0.25, 0), (0.2500001, 1), (2.0, 1)]:
        old = torch.tensor([-3.0], dtype=torch.float64)
        batch = [Response(old + sign * distance, old, old, 0.0)]
        packed = pack(batch)
        total, gradient, loss = run(packed, config, **counts(batch))
        assert float(total) == pytest.approx(acts * 0.5 * distance)
        assert float(gradient[packed.rows[0]]) == acts * 0.5 * sign
        assert bool(loss.penalised[packed.rows[0]]) == acts and bool(
            loss.penalty_tokens[packed.rows[0]]
        )


def test_the_penalty_of_selected_tokens_is_counted_of_these_alone():
    """`train/penalty_frac`: penalised tokens of those that the penalty applies to."""
    old = torch.tensor([-1.0, -2.0, -1.5, -0.5], dtype=torch.float64)
    batch = [Response(old + torch.tensor([0.5, 0.5, 1e-3, 0.0]), old, old, 1.0)]
    packed = pack(batch, prompts=0, pads=1)
    for chosen, tokens, penalised in [
        (
            [True, False, True, True],
            [True, False, True, True, False],
            [True, False, False, False, False],
        ),
        ([False] * 4, [False] * 5, [False] * 5),
    ]:
        packed.selected = torch.tensor([*chosen, True])
        _, _, loss = run(packed, loss_of("kl_cov"), **counts(batch))
        assert (loss.penalty_tokens.tolist(), loss.penalised.tolist()) == (tokens, penalised)
    for config, tokens in [
        (loss_of("dppo_tau"), [True] * 4 + [False]),
        (loss_of("clip_cov", penalty="abs", penalty_coef=1.0), [True] * 4 + [False]),
    ]:
        _, _, loss = run(packed, config, **counts(batch))
        assert loss.penalty_tokens.tolist() == tokens and not loss.penalised[-1]
    assert run(packed, loss_of("grpo"), **counts(batch))[2].penalised is None


def test_dppo_tau_without_its_penalty_is_dppo_without_truncation():
    same = {"weight_mode": "none", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean"}
    plain = loss_of("dppo", **same)
    for seed in range(4):
        found = gradients(responses(seed), loss_of("dppo_tau", penalty="none"))
        torch.testing.assert_close(found, gradients(responses(seed), plain), **EXACT)


def test_vaco_of_responses_that_are_close_is_tis():
    close = [Response(r.logprobs, r.old, r.old + 1e-3, r.advantage) for r in responses(1)]
    torch.testing.assert_close(
        gradients(close, loss_of("vaco")), gradients(close, loss_of("tis")), **EXACT
    )
    far = responses(1)
    assert not torch.equal(gradients(far, loss_of("vaco")), gradients(far, loss_of("tis")))


@pytest.mark.parametrize("seed", range(4))
def test_rspo_with_a_floor_of_1_is_gmpo(seed):
    batch = responses(seed)
    torch.testing.assert_close(
        gradients(batch, loss_of("rspo", shift_floor=1.0)),
        gradients(batch, loss_of("gmpo")),
        **EXACT,
    )
    assert not torch.equal(gradients(batch, loss_of("rspo")), gradients(batch, loss_of("gmpo")))


@pytest.mark.parametrize("level", ["token", "geometric", "product"])
def test_the_router_shift_rescales_the_ratio_at_every_level_before_the_clip(level):
    """GRPO and GSPO with it: q = r gamma, or its mean or product; held by the bounds that q
    exceeds.
    """
    config = loss_of("grpo", clip_level=level, router_shift=True, shift_floor=0.7)
    held = 0
    for seed in range(6):
        batch = responses(seed)
        packed = pack(batch)
        _, gradient, loss = run(packed, config, **counts(batch))
        for r, rows in zip(batch, packed.rows, strict=True):
            columns = zip(r.logprobs.tolist(), r.old.tolist(), r.mu.tolist(), strict=True)
            logs = [x - o + max(-abs(o - m) / 2, math.log(0.7)) for x, o, m in columns]
            whole = {"product": sum(logs), "geometric": sum(logs) / len(logs)}
            for row, log in zip(rows.tolist(), logs, strict=True):
                q, a = math.exp(whole.get(level, log)), r.advantage
                stopped = (a > 0 and q > 1.2) or (a < 0 and q < 0.8)
                expected = 0.0 if stopped else -a * q / len(logs) / len(batch)
                assert float(gradient[row]) == pytest.approx(expected, rel=1e-9, abs=1e-13)
                held += stopped
            floors = [
                abs(o - m) / 2 > -math.log(0.7)
                for o, m in zip(r.old.tolist(), r.mu.tolist(), strict=True)
            ]
            assert loss.at_floor[rows].tolist() == floors
        assert not loss.at_floor[~loss.mask].any()
    assert held
    assert 0.7 <= float(loss.trust[loss.mask].min()) < float(loss.trust[loss.mask].max()) <= 1.0


def test_a_token_exactly_at_the_floor_is_not_held_there():
    batch = responses(0)
    # no shift: gamma = 1
    still = [Response(r.logprobs, r.old, r.old.clone(), r.advantage) for r in batch]
    _, _, loss = run(pack(still), loss_of("rspo", shift_floor=1.0), **counts(batch))
    assert not loss.at_floor.any()
    _, _, loss = run(pack(batch), loss_of("rspo", shift_floor=1.0), **counts(batch))
    assert loss.at_floor[loss.mask].all()


def test_a_missing_router_shift_is_named():
    batch = responses(0)
    p = pack(batch)
    inputs = LossInputs(p.logprobs, p.old, p.mu, p.advantages, p.mask, p.sequences)
    with pytest.raises(ValueError, match="router_shift = true needs router_shift"):
        policy_loss(inputs, loss_of("rspo"))
