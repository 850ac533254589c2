"""megatron_rl.loss without Megatron and SGLang: imports, the example of the documentation, a user's
loss.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.losses.sapo import TAU_NEGATIVE, TAU_POSITIVE
from megatron_rl.loss import LossConfig, LossInputs
from tests.unit.loss.cases import counts, loss_of, pack, responses, run, run_whole

ROOT = Path(__file__).resolve().parents[3]
BLOCKED = ("megatron", "sglang", "transformers", "transformer_engine", "apex")


def run_without_engines(code):
    block = f"import sys\nfor name in {BLOCKED}:\n    sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_example_of_the_documentation_runs_without_megatron_or_sglang():
    code, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guides/algorithms.md").read_text(), re.DOTALL
    )
    assert len(code.splitlines()) <= 14
    done = run_without_engines(code)
    assert done.returncode == 0, done.stderr
    numbers = [float(x) for x in re.findall(r"-?\d+\.?\d*", done.stdout)]
    e = torch.tensor([0.1, 0.0, 0.1]).exp()  # pi/mu of the first three tokens
    expected = [-0.5 * float(e[0]) / 2, -0.5 / 2, 0.5 * float(e[2]) / 2, 0.0]
    assert numbers == pytest.approx(expected, abs=1e-4)
    assert "False, False, False,  True" in done.stdout


def test_the_block_is_real():
    done = run_without_engines("import megatron.core")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_a_users_loss_is_aggregated_masked_and_differentiated():
    """The example against its formula, response by response; sequence_mean."""
    batch = responses(3)
    total, gradients = run_whole(
        batch, loss_of("examples.losses.sapo:sapo", aggregation="sequence_mean")
    )
    for r in batch:
        r.logprobs.requires_grad_()
    expected = 0.0
    for r in batch:
        for x, old in zip(r.logprobs, r.old, strict=True):
            tau = TAU_POSITIVE if r.advantage > 0 else TAU_NEGATIVE
            expected = expected - 4 / tau / (
                1 + (-tau * ((x - old).exp() - 1)).exp()
            ) * r.advantage / len(r.old) / len(batch)
    expected.backward()
    # tau is a float32 number
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-9)
    for got, r in zip(gradients, batch, strict=True):
        torch.testing.assert_close(got, r.logprobs.grad, rtol=1e-6, atol=1e-9)


def only_zeros_outside_the_mask(inputs: LossInputs, config: LossConfig):
    for values in (
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.rollout_logprobs,
        inputs.advantages,
    ):
        assert (values[~inputs.mask] == 0).all() and (values[inputs.mask] != 0).any()
    return inputs.logprobs


def test_a_users_loss_sees_zeros_outside_the_mask():
    """Prompts, pads, a token that is not learned and one with a bad log-prob, whose response has an
    advantage.
    """
    packed = pack([r for r in responses(5) if r.advantage])
    first, second = max(packed.rows, key=len)[:2].tolist()
    packed.mask[first], packed.old[second] = False, float("nan")
    packed.advantages[~packed.mask] = 7.0
    run(packed, loss_of(f"{__name__}:only_zeros_outside_the_mask"), **counts(responses(5)))


def too_short(inputs: LossInputs, config: LossConfig):
    return inputs.logprobs[:-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.losses:mine", "no_such_package"),
        ("examples.losses.sapo:sappo", "sappo"),
        ("examples.losses.sapo:TAU_POSITIVE", "not a function"),
        (f"{__name__}:too_short", "one loss per token"),
    ],
)
def test_a_bad_user_loss_is_named(name, message):
    with pytest.raises(ValueError, match=rf"loss\.name = '{re.escape(name)}'.*{message}"):
        run(pack(responses(0)), loss_of(name), **counts(responses(0)))
