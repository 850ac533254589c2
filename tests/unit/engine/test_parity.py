"""The verdict of the handshake; the handshake itself runs in tests/e2e."""

import math

import pytest

from megatron_rl.engine.parity import ParityReport


@pytest.mark.parametrize(
    ("mean", "experts", "same_precision", "agrees"),
    [
        (5e-5, None, True, True),
        (5e-5, 1.0, True, True),
        (5e-5, 0.99, True, False),
        (5e-3, 1.0, True, False),
        (5e-3, 0.99, False, True),
        (0.3, 0.99, False, False),
        (5e-3, 0.7, False, False),
        (math.nan, 1.0, False, False),  # not one finite log-prob
        (math.nan, None, True, False),
    ],
)
def test_verdict(mean, experts, same_precision, agrees):
    assert ParityReport(mean, mean, experts, 0.0).agrees(same_precision=same_precision) is agrees
