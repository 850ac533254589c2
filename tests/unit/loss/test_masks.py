"""Masks of tokens and of responses, alone and together, against loops over plain numbers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.loss import policy_loss
from tests.unit.loss.cases import Response, counts, inputs_of, loss_of, pack, responses, run


def kl_of(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


TOKEN = {  # name -> (settings, whether a token with this ratio rho and this mu stays)
    "none": ({}, lambda rho, mu: True),
    "icepop": (
        {"mask": "train_infer", "mask_low": 0.5, "mask_high": 1.5},
        lambda rho, mu: 0.5 <= rho <= 1.5,
    ),
    "kpop": (
        {"mask": "train_infer", "mask_kind": "kl", "mask_high": 0.02},
        lambda rho, mu: max(kl_of(rho * mu, mu), kl_of(mu, rho * mu)) <= 0.02,
    ),
}
WEIGHT = {
    "none": ({}, lambda rhos, t: 1.0),
    "token": ({"weight": "train_infer", "weight_mode": "truncate", "weight_high": 1.2}, lambda rhos,
    t: min(rhos[t], 1.2)),
    "sequence": (
        {"weight": "train_infer", "weight_level": "product", "weight_mode": "truncate",
        "weight_high": 1.2},
        lambda rhos, t: min(math.prod(rhos), 1.2),
    ),
}  # fmt: skip
VETO = {
    "none": ({}, lambda rhos: True),
    "outlier": (
        {"veto": "train_infer", "veto_low": 0.3, "veto_high": 3.0},
        lambda rhos: all(0.3 <= r <= 3.0 for r in rhos),
    ),
}
MEANS = {
    "mean_shift": lambda p, q: abs(p / q - 1),
    "mean_tv": lambda p, q: abs(p - q),
    "mean_kl": lambda p, q: q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
    "mean_k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "mean_k3": lambda p, q: p / q - 1 - math.log(p / q),
}


def mean_of(level, r):
    """The response's statistic of pi_old against mu."""
    pairs = [(math.exp(o), math.exp(m)) for o, m in zip(r.old.tolist(), r.mu.tolist(), strict=True)]
    if level in MEANS:
        return sum(MEANS[level](p, q) for p, q in pairs) / len(pairs)
    log = sum(math.log(p / q) for p, q in pairs)
    return math.exp(log if level == "product" else log / len(pairs))


REJECT = {
    "none": ({}, None, math.inf),
    "geometric": ({"reject": "train_infer", "reject_high": 1.1}, "geometric", 1.1),
    "mean_k3": (
        {"reject": "train_infer", "reject_level": "mean_k3", "reject_high": 0.05},
        "mean_k3",
        0.05,
    ),
}


@pytest.mark.parametrize(
    ("weight", "token", "reject", "veto"), itertools.product(WEIGHT, TOKEN, REJECT, VETO)
)
def test_every_mask_works_beside_every_other(weight, token, reject, veto):
    """Per-token loss of REINFORCE: -keep W A log pi, and the marks of the metrics."""
    settings = WEIGHT[weight][0] | TOKEN[token][0] | REJECT[reject][0] | VETO[veto][0]
    level, bound = REJECT[reject][1:]
    for seed in range(3):
        batch = responses(seed)
        packed = pack(batch)
        _, _, loss = run(packed, loss_of("reinforce", **settings), **counts(batch))
        for r, rows in zip(batch, packed.rows, strict=True):
            rhos = [math.exp(o - m) for o, m in zip(r.old.tolist(), r.mu.tolist(), strict=True)]
            kept = VETO[veto][1](rhos) and (level is None or mean_of(level, r) <= bound)
            for t, row in enumerate(rows.tolist()):
                stays = TOKEN[token][1](rhos[t], math.exp(r.mu[t]))
                expected = (
                    -WEIGHT[weight][1](rhos, t) * r.advantage * float(r.logprobs[t])
                    if kept and stays
                    else 0.0
                )
                assert float(loss.per_token[row]) == pytest.approx(expected, rel=1e-10, abs=1e-14)
                assert (
                    bool(loss.rejected[row]) == (not kept)
                    and bool(loss.in_weight_mask[row]) == stays
                )


def test_the_random_batches_reach_every_mask():
    batch = [r for seed in range(3) for r in responses(seed)]
    rhos = [
        [math.exp(o - m) for o, m in zip(r.old.tolist(), r.mu.tolist(), strict=True)] for r in batch
    ]
    for test in (
        *(
            [
                TOKEN[name][1](rho, math.exp(mu))
                for r, parts in zip(batch, rhos, strict=True)
                for rho, mu in zip(parts, r.mu.tolist(), strict=True)
            ]
            for name in ("icepop", "kpop")
        ),
        [VETO["outlier"][1](parts) for parts in rhos],
        [mean_of("geometric", r) <= 1.1 for r in batch],
        [mean_of("mean_k3", r) <= 0.05 for r in batch],
        [
            r.advantage * (rho - 1) > 0
            for r, parts in zip(batch, rhos, strict=True)
            for rho in parts
        ],
    ):
        assert any(test) and not all(test)


@pytest.mark.parametrize("only", ["all", "negative", "diverging"])
@pytest.mark.parametrize("level", ["product", "geometric", *MEANS])
def test_responses_are_rejected_by_their_statistic(level, only):
    """The bound lies directly below or above one response's statistic; `only` says which of the
    rejected tokens.
    """
    for seed, factor in itertools.product(range(3), (1 - 1e-6, 1 + 1e-6)):
        batch = responses(seed)
        bound = factor * sorted(mean_of(level, r) for r in batch)[3]
        packed = pack(batch)
        config = loss_of(
            "reinforce",
            reject="train_infer",
            reject_level=level,
            reject_high=bound,
            reject_only=only,
        )
        _, _, loss = run(packed, config, **counts(batch))
        marked = 0
        for r, rows in zip(batch, packed.rows, strict=True):
            for row, o, m in zip(rows.tolist(), r.old.tolist(), r.mu.tolist(), strict=True):
                chosen = {
                    "all": True,
                    "negative": r.advantage < 0,
                    "diverging": r.advantage * (o - m) > 0,
                }[only]
                assert bool(loss.rejected[row]) == (mean_of(level, r) > bound and chosen)
                marked += bool(loss.rejected[row])
        assert marked or only != "all"


@pytest.mark.parametrize(
    ("name", "mark"),
    [("reinforce", "selected"), ("sapo", "clipped_high"), ("drpo", "clipped_high")],
)
def test_what_a_preset_does_not_do_is_not_counted(name, mark):
    """Without a selection no token is selected; the soft forms clip none."""
    packed = pack(responses(0))
    config = loss_of(name)
    loss = policy_loss(inputs_of(packed, config, packed.logprobs), config)
    assert not getattr(loss, mark).any()


def test_a_token_with_equal_logprobs_does_not_diverge():
    """Its response is rejected for the other token, which alone moves further away."""
    old, mu = (
        torch.tensor([-1.0, -0.5], dtype=torch.float64),
        torch.tensor([-1.0, -2.0], dtype=torch.float64),
    )
    batch = [Response(old, old, mu, 1.0)]
    config = loss_of(
        "reinforce",
        reject="train_infer",
        reject_level="mean_shift",
        reject_high=0.1,
        reject_only="diverging",
    )
    packed = pack(batch)
    _, _, loss = run(packed, config, **counts(batch))
    assert loss.rejected[packed.rows[0]].tolist() == [False, True]


def test_a_token_whose_router_shift_is_not_finite_is_masked():
    packed = pack(responses(0))
    shift = torch.zeros_like(packed.old)
    shift[packed.rows[1][2]] = math.inf
    config = loss_of("rspo")
    inputs = replace(inputs_of(packed, config, packed.logprobs), router_shift=shift)
    mask = policy_loss(inputs, config).mask
    assert (packed.mask & ~mask).nonzero().flatten().tolist() == [int(packed.rows[1][2])]


def test_a_log_ratio_counts_as_20_at_most():
    """In a response's statistic, here 20^2 / 2 = 200, and in the penalty."""
    new, far = (
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([-1001.0], dtype=torch.float64),
    )
    batch = [Response(new, new, far, 1.0)]
    for bound, rejected in ((201.0, False), (199.0, True)):
        config = loss_of(
            "reinforce", reject="train_infer", reject_level="mean_k2", reject_high=bound
        )
        assert bool(run(pack(batch), config, **counts(batch))[2].rejected.any()) == rejected
    penalised = run(pack(batch), loss_of("dppo_tau"), **counts(batch))[2]
    assert float(penalised.terms.sum()) == pytest.approx(1e-3 * 20.0**2)


def test_a_mask_at_its_bounds_keeps_and_a_veto_at_its_bounds_does_not_fire():
    for old, inside in [(math.log(2.0), True), (math.log(0.5), True), (0.7, False), (-0.7, False)]:
        batch = [Response(*(torch.tensor([v], dtype=torch.float64) for v in (-1.0, old, 0.0)), 1.0)]
        for key in ("mask", "veto"):
            config = loss_of(
                "reinforce", **{key: "train_infer", f"{key}_low": 0.5, f"{key}_high": 2.0}
            )
            _, gradient, _ = run(pack(batch), config, **counts(batch))
            assert bool((gradient != 0).any()) == inside, (key, old)


@pytest.mark.parametrize("aggregation", ["kept_mean", "sequence_mean", "token_mean"])
def test_icepop_is_its_weight_with_a_mask(aggregation):
    """The same two ways of masking the same ratio, the denominators too."""
    batch = responses(0)
    by_weight = loss_of("icepop", weight_low=0.5, weight_high=1.5, aggregation=aggregation)
    by_mask = loss_of(
        "icepop",
        weight_mode="none",
        mask="train_infer",
        mask_low=0.5,
        mask_high=1.5,
        aggregation=aggregation,
    )
    total, gradient, loss = run(pack(batch), by_weight, **counts(batch))
    other, other_gradient, _ = run(pack(batch), by_mask, **counts(batch))
    assert not loss.in_weight_mask[loss.mask].all()
    torch.testing.assert_close(total, other, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-13, atol=0)
