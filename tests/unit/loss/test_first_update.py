"""The first update of a step: pi = pi_old up to the rounding of two passes, which must not decide
what is learned.

Shapes: float32 responses of 12 tokens.
"""

import pytest
import torch

from megatron_rl.loss import PRESETS
from tests.unit.loss.cases import Response, loss_of, run_whole

BY_THE_SIGN_OF_RHO = {
    "vaco": (
        "its filter drops the tokens of a distant response that have A (rho - 1) > 0: a jump at rho"
        " = 1 (2603.01365)"
    ),
}


def moved(values, ulps):
    """Each value `ulps` float32 numbers further up."""
    for _ in range(int(ulps.abs().max())):
        further = torch.nextafter(values, torch.where(ulps > 0, 100.0, -100.0))
        values = torch.where(ulps == 0, values, further)
    return values


def gradient(name, *, which, ulps, far, **switches):
    """Of four responses with pi = pi_old, where `which` of the two is moved; far: mu differs, but
    for every third token.
    """
    g = torch.Generator().manual_seed(0)
    batch = []
    for advantage in (1.0, -0.75, 0.25, -1.5):
        x = -3 * torch.rand(12, generator=g) - 0.1
        noise = torch.where(
            torch.arange(12) % 3 == 0, 0.0, 0.6 * torch.randn(12, generator=g).sign()
        )
        other = moved(x, ulps)
        pi, old = (other, x) if which == "pi" else (x, other)
        batch.append(Response(pi, old, x + noise if far else x.clone(), advantage))
    return torch.cat(run_whole(batch, loss_of(name, **switches))[1])


ULPS = [torch.ones(12), -torch.ones(12), torch.tensor([1.0, -1.0, 0.0]).repeat(4)]


def largest_change(name, **inputs):
    """Of a token's gradient, relative to the largest gradient, over rounding of one unit in the
    last place.
    """
    exact = gradient(name, which="old", ulps=torch.zeros(12), **inputs)
    found = [
        gradient(name, which=which, ulps=ulps, **inputs) for which in ("old", "pi") for ulps in ULPS
    ]
    return max(float((each - exact).abs().max()) for each in found) / max(
        float(exact.abs().max()), 1e-3
    )


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_rounding_changes_the_gradient_by_rounding(name, far):
    """Ratios of 1 are 12 units in the last place from 1 at most, also that of a complete
    response.
    """
    if far and name in BY_THE_SIGN_OF_RHO:
        assert largest_change(name, far=far) > 0.1, "no exception any more"
    else:
        assert largest_change(name, far=far) < 1e-5


def test_without_its_dead_zone_kl_cov_is_decided_by_rounding():
    """And where every token is selected the zone holds for each."""
    assert largest_change("kl_cov", far=False, penalty_dead_zone=0.0) > 0.3
    assert largest_change("kl_cov", far=False, select_share=1.0) < 1e-5


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("grpo", {"clip_high": 0.0}),
        ("dppo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("icepop", {"weight_low": 1.0}),
        ("reinforce", {"mask": "staleness", "mask_high": 1.0}),
        ("reinforce", {"veto": "staleness", "veto_low": 1.0}),
        ("geo_rs", {"reject": "staleness", "reject_low": 1.0}),
        ("reinforce", {"penalty": "abs", "penalty_coef": 1.0, "penalty_dead_zone": 0.0}),
    ],
)
def test_a_bound_at_one_is_decided_by_rounding(name, switches):
    """docs/concepts/formulation.md names these; no preset has one."""
    assert largest_change(name, far=False, **switches) > 0.1
