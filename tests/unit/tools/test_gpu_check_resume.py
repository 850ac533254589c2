"""gpu-check's step `checkpoint`: a resume that loses Adam's state fails on every device."""

import math
import sys
from pathlib import Path

import pytest

from megatron_rl.checkpoint.checkpointer import Checkpointer
from megatron_rl.checkpoint.state import inner_optimizers
from megatron_rl_tools.gpu_check import replay
from megatron_rl_tools.gpu_check.steps import StepPlace

LOST = "the loaded optimizer state is not the saved one"


@pytest.mark.parametrize("value", [None, 0.0, math.nan])
def test_a_resume_that_loses_moments_fails(tmp_path, monkeypatch, value):
    load = Checkpointer.load

    def broken(self, folder):
        restored = load(self, folder)
        states = inner_optimizers(self.engine)[0].optimizer.state.values()
        last = [state for state in states if "exp_avg" in state][-1]
        if value is not None:
            last["exp_avg"].fill_(value)
        return restored

    monkeypatch.setattr(Checkpointer, "load", broken)
    outcome = replay.checkpoint(StepPlace("cpu", tmp_path, True, Path(sys.executable)))
    assert outcome.verdict == ("passed" if value is None else "failed"), outcome
    assert (LOST in outcome.reason) == (value is not None)
    is_nan = value is not None and math.isnan(value)
    assert ("are not finite" in outcome.reason) == is_nan
