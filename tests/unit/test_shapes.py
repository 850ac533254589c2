"""The shapes in signatures are enforced while unit tests run: tests/shapes.py."""

import importlib
import subprocess
import sys

import jaxtyping
import pytest
import torch

from megatron_rl.loss.kl import kl_to_reference
from megatron_rl.loss.ratios import ratio_of
from megatron_rl.loss.sequences import Sequences
from megatron_rl.metrics.histogram import tabulate
from megatron_rl.replay.compatibility import check_compatibility
from megatron_rl.replay.layout import zigzag_rows
from tests.shapes import CHECKED

pytestmark = pytest.mark.skipif(
    jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE is set"
)
IDS, MASK = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: ratio_of(torch.zeros(3), torch.zeros(4)), "denominator"),
        (lambda: kl_to_reference(torch.zeros(3, 1), torch.zeros(3), "k1"), "logprobs"),
        (lambda: tabulate(torch.zeros(3), MASK, torch.zeros(3), 1), "groups"),
        (lambda: zigzag_rows(torch.zeros(2), 0, 1), "cu_seqlens"),
        (lambda: Sequences(IDS, 1, IDS[:2]), "lengths"),
    ],
    ids=[
        "another length",
        "another number of axes",
        "not integers",
        "not integers either",
        "a record",
    ],
)
def test_a_wrong_shape_is_refused(call, argument):
    with pytest.raises(
        jaxtyping.TypeCheckError, match=f"parameter '{argument}'|argument '{argument}'"
    ):
        call()


def test_stand_ins_may_take_the_place_of_what_is_no_tensor():
    with pytest.raises(ValueError, match="'k4' is unknown"):
        kl_to_reference(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_checked_exists(name):
    assert importlib.import_module(name)


def test_a_function_without_a_shape_is_left_as_it_is():
    """The planner calls some of them a million times."""
    assert hasattr(ratio_of, "__wrapped__") and not hasattr(check_compatibility, "__wrapped__")


def test_only_pytest_checks():
    """A rank that a test spawns, and a user's run, have neither the hook nor beartype."""
    code = (
        "import sys, torch; from megatron_rl.loss.ratios import ratio_of; assert"
        " ratio_of(torch.zeros(3), torch.zeros(1)).shape == (3,); assert 'beartype' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
