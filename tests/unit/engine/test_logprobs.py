"""token_logprobs and fused_logprobs on one rank against float64 autograd of log_softmax; peak
memory as torch counts it.

Numbers of ranks: tests/dist/test_sharded_logprobs.py.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_rl.engine import fused_logprobs as fused
from megatron_rl.engine import logprobs, shards
from megatron_rl.engine.fused_logprobs import HeadSettings, defer_lm_head
from megatron_rl.models.spec import ModelError


def token_logprobs(logits, labels, **settings):
    """(log-probs, entropy), which have gradients."""
    return logprobs.token_logprobs(logits, labels, **settings)[:2]


def fused_logprobs(hidden, weight, labels, settings):
    return fused.fused_logprobs(hidden, weight, labels, None, settings)[:2]


def reference(logits, labels, vocab, temperature):
    logp = (logits.double()[:, :vocab] / temperature).log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def gradients(outputs, weights, inputs):
    """d (weights . outputs) / d inputs; a weight of None leaves that output out of the graph."""
    used = [
        (output, weight)
        for output, weight in zip(outputs, weights, strict=True)
        if weight is not None
    ]
    return torch.autograd.grad([o for o, _ in used], inputs, [w.to(o.dtype) for o, w in used])


def close(got, expected, tolerance):
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("block_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [50, 47])
@pytest.mark.parametrize("which", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_values_and_gradients(block_rows, temperature, vocab, which, overwrite, monkeypatch):
    monkeypatch.setitem(shards.BLOCK_BYTES, "cpu", block_rows * 4 * vocab)
    torch.manual_seed(0)
    logits = 5 * torch.randn(64, 50)
    labels = torch.randint(0, vocab, (64,))
    labels[:2] = torch.tensor([0, vocab - 1])
    weights = [
        torch.randn(64) if which in ("both", name) else None for name in ("logprobs", "entropy")
    ]
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = token_logprobs(
        x,
        labels,
        vocab_size=vocab,
        temperature=temperature,
        overwrite=overwrite,
    )
    expected = reference(y, labels, vocab, temperature)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        close(a, b, 5e-6)
    (grad,), (expected_grad,) = gradients(got, weights, [x]), gradients(expected, weights, [y])
    assert (grad.double() - expected_grad).norm() <= 1e-6 * expected_grad.norm()
    assert (grad[:, vocab:] == 0).all()
    assert (grad.data_ptr() == x.data_ptr()) == overwrite
    assert torch.equal(x, logits) != overwrite


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [50, 47])
@pytest.mark.parametrize("into_main_grad", [False, True])
def test_fused_values_and_gradients(chunk_rows, temperature, vocab, into_main_grad):
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 16), torch.randn(50, 16)
    labels, weights = torch.randint(0, vocab, (64,)), [torch.randn(64), torch.randn(64)]
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = torch.ones(50, 16), False
    settings = HeadSettings(
        vocab_size=vocab,
        temperature=temperature,
        chunk_rows=chunk_rows,
        into_main_grad=into_main_grad,
    )
    got = fused_logprobs(x, w, labels, settings)
    y, v = hidden.double().requires_grad_(), head.double().requires_grad_()
    expected = reference(y @ v.t(), labels, vocab, temperature)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-5)
    torch.autograd.backward(got, weights)
    expected_hidden, expected_head = gradients(expected, weights, [y, v])
    head_grad = w.main_grad - 1 if into_main_grad else w.grad
    assert (x.grad.double() - expected_hidden).norm() <= 1e-6 * expected_hidden.norm()
    assert (head_grad.double() - expected_head).norm() <= 1e-6 * expected_head.norm()
    assert (head_grad[vocab:] == 0).all()
    assert w.grad_added_to_main_grad == into_main_grad and (w.grad is None) == into_main_grad


def test_bf16_logits_are_read_in_float32_and_left_alone():
    torch.manual_seed(1)
    before = (8 * torch.randn(32, 200)).bfloat16()
    labels, weights = torch.randint(0, 200, (32,)), [torch.randn(32), torch.randn(32)]
    x, y = before.clone().requires_grad_(), before.double().requires_grad_()
    got, expected = token_logprobs(x, labels, vocab_size=200), reference(y, labels, 200, 1.0)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-5)
    (grad,), (expected_grad,) = gradients(got, weights, [x]), gradients(expected, weights, [y])
    assert (
        grad.dtype == torch.bfloat16
        and (grad.double() - expected_grad).norm() <= 3e-3 * expected_grad.norm()
    )
    assert torch.equal(x, before)


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_bf16_fused_form_equals_the_one_on_logits(into_main_grad):
    """Logits and their gradient are rounded alike; sums over rows stay float32 in main_grad."""
    torch.manual_seed(1)
    hidden, head = torch.randn(96, 32).bfloat16(), torch.randn(200, 32).bfloat16()
    labels, weights = torch.randint(0, 199, (96,)), [torch.randn(96), torch.randn(96)]
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(200, 32), False
    got = fused_logprobs(
        x, w, labels, HeadSettings(vocab_size=199, chunk_rows=40, into_main_grad=into_main_grad)
    )
    torch.autograd.backward(got, weights)
    y, v = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    expected = token_logprobs(y @ v.t(), labels, vocab_size=199)
    torch.autograd.backward(expected, weights)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-5)
    head_grad = w.main_grad if into_main_grad else w.grad
    for a, b in ((x.grad, y.grad), (head_grad, v.grad)):
        assert (a.double() - b.double()).norm() <= 3e-3 * b.double().norm()


def test_float64_is_computed_in_float64():
    torch.manual_seed(2)
    logits, labels = 5 * torch.randn(9, 30, dtype=torch.float64), torch.randint(0, 30, (9,))
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, expected = (
        token_logprobs(x, labels, vocab_size=30, temperature=1.3),
        reference(y, labels, 30, 1.3),
    )
    weights = [torch.randn(9), torch.randn(9)]
    for a, b in zip(
        [*got, *gradients(got, weights, [x])],
        [*expected, *gradients(expected, weights, [y])],
        strict=True,
    ):
        assert a.dtype == torch.float64
        close(a, b, 1e-13)
    hidden, head = torch.randn(9, 4, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    got, expected = (
        fused_logprobs(hidden, head, labels, HeadSettings(vocab_size=30)),
        reference(hidden @ head.t(), labels, 30, 1.0),
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-13)


def test_gradients_by_finite_differences():
    torch.manual_seed(3)
    hidden, head = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    labels = torch.tensor([0, 5, 2, 3, 5])
    inputs = (hidden.requires_grad_(), head.requires_grad_())
    settings = HeadSettings(vocab_size=6, temperature=0.8, chunk_rows=2)
    assert torch.autograd.gradcheck(lambda h, w: fused_logprobs(h, w, labels, settings), inputs)


def test_extreme_logits_stay_finite():
    rows = torch.tensor([[1e4, 0.0, -1e4], [1e4, 1e4, 1e4], [-1e4, -1e4, -1e4], [0.0, 0.0, 1e4]])
    labels = torch.tensor([1, 0, 2, 2])
    x, y = rows.clone().requires_grad_(), rows.double().requires_grad_()
    got, expected = token_logprobs(x, labels, vocab_size=3), reference(y, labels, 3, 1.0)
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-5)
    weights = [torch.ones(4), torch.ones(4)]
    close(gradients(got, weights, [x])[0], gradients(expected, weights, [y])[0], 1e-6)


def test_no_rows_and_labels_that_do_not_exist():
    x = torch.zeros(0, 5, requires_grad=True)
    got = token_logprobs(x, torch.zeros(0, dtype=torch.long), vocab_size=5)
    assert [len(value) for value in got] == [0, 0] and gradients(got, got, [x])[0].shape == (0, 5)
    hidden, head = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    got = fused_logprobs(hidden, head, torch.zeros(0, dtype=torch.long), HeadSettings(vocab_size=5))
    assert (gradients(got, got, [hidden, head])[1] == 0).all()
    for label in (-100, 4, 5):
        assert token_logprobs(torch.zeros(1, 5), torch.tensor([label]), vocab_size=4)[0].isnan()


def test_a_second_backward_over_written_logits_is_refused():
    logits = torch.randn(3, 4, requires_grad=True)
    logp, _ = token_logprobs(logits * 1.0, torch.tensor([0, 1, 2]), vocab_size=4, overwrite=True)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only one backward pass"):
        logp.sum().backward()


def test_fused_form_names_what_does_not_fit():
    hidden, head, labels = (
        torch.zeros(3, 4),
        torch.zeros(5, 4, requires_grad=True),
        torch.zeros(3, dtype=torch.long),
    )
    with pytest.raises(ValueError, match="hidden is torch.bfloat16, weight torch.float32"):
        fused_logprobs(hidden.bfloat16(), head, labels, HeadSettings(vocab_size=5))
    with pytest.raises(ValueError, match="no main_grad"):
        fused_logprobs(hidden, head, labels, HeadSettings(vocab_size=5, into_main_grad=True))
    with pytest.raises(ValueError, match="3 rows of hidden states, 2 labels"):
        fused_logprobs(hidden, head, labels[:2], HeadSettings(vocab_size=5))


def peak_bytes(run):
    """The most that was allocated at one time within `run`, beyond what was there before, by
    torch's own account.
    """
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("overwrite, limit", [(False, 1.1), (True, 0.1)])
def test_peak_memory_on_logits(overwrite, limit):
    """In units of one float32 [T, V]; the gradient included."""
    logits, labels = torch.randn(4096, 4000, requires_grad=True), torch.randint(0, 4000, (4096,))

    def run():
        got = token_logprobs(logits, labels, vocab_size=4000, overwrite=overwrite)
        torch.autograd.grad(got, logits, [torch.ones(4096)] * 2)

    assert peak_bytes(run) / logits.nbytes < limit


def test_peak_memory_of_the_fused_form_does_not_grow_with_the_logits():
    """Eight times the rows; beyond d hidden, which is the caller's, not even a tenth more."""
    peaks = []
    for rows in (256, 2048):
        hidden, head = (
            torch.randn(rows, 8, requires_grad=True),
            torch.randn(4000, 8, requires_grad=True),
        )
        labels = torch.randint(0, 4000, (rows,))

        def run(hidden=hidden, head=head, labels=labels):
            got = fused_logprobs(hidden, head, labels, HeadSettings(vocab_size=4000, chunk_rows=64))
            torch.autograd.grad(got, [hidden, head], [torch.ones(len(labels))] * 2)

        peaks.append(peak_bytes(run) - hidden.nbytes)
    assert peaks[1] / peaks[0] < 1.2 and peaks[1] < 0.2 * 4 * 2048 * 4000


def test_an_output_layer_that_caps_logits_is_not_fused():
    """As Bridge makes Gemma's: a class in front of core's changes what its forward returns."""

    class Capped(ColumnParallelLinear):
        def forward(self, *args, **settings):
            output, bias = super().forward(*args, **settings)
            return output.tanh(), bias

    plain = ColumnParallelLinear.__new__(ColumnParallelLinear)
    model = SimpleNamespace(post_process=True, output_layer=plain)
    defer_lm_head(model)
    hidden = torch.ones(2, 3)
    assert model.output_layer.forward(hidden)[0] is hidden
    model = SimpleNamespace(post_process=True, output_layer=Capped.__new__(Capped))
    with pytest.raises(
        ModelError, match=r"fused_lm_head = true: .*does more than multiply.*set it to false"
    ):
        defer_lm_head(model)
    defer_lm_head(SimpleNamespace(post_process=False))  # another stage
