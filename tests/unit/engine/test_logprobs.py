"""token_logprobs against float64 log_softmax: values, gradients, chunks, padding columns, temperature."""

import pytest
import torch

from megatron_rl.engine.logprobs import token_logprobs


def reference(logits, labels, vocab, temperature):
    logp = (logits.double()[:, :vocab] / temperature).log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [50, 47])
def test_values_and_gradients(chunk, temperature, vocab):
    torch.manual_seed(0)
    logits = 5 * torch.randn(64, 50)
    labels = torch.randint(0, vocab, (64,))
    weights = torch.randn(2, 64)
    x = logits.clone().requires_grad_()
    logp, entropy = token_logprobs(x, labels, vocab_size=vocab, temperature=temperature, chunk=chunk)
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    y = logits.double().requires_grad_()
    want_logp, want_entropy = reference(y, labels, vocab, temperature)
    (weights[0] * want_logp + weights[1] * want_entropy).sum().backward()
    torch.testing.assert_close(logp.double(), want_logp, rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=5e-6)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=5e-6)
    assert (x.grad[:, vocab:] == 0).all()


def test_bf16_logits_are_read_in_float32_and_left_alone():
    torch.manual_seed(1)
    logits = (8 * torch.randn(32, 200)).bfloat16()
    before = logits.clone()
    labels = torch.randint(0, 200, (32,))
    x = logits.requires_grad_()
    logp, entropy = token_logprobs(x, labels, vocab_size=200)
    (logp.sum() + entropy.sum()).backward()
    want_logp, want_entropy = reference(before, labels, 200, 1.0)
    assert (logp.double() - want_logp).abs().max() < 1e-5 and (entropy.double() - want_entropy).abs().max() < 1e-5
    assert torch.equal(logits, before) and x.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]]).requires_grad_()
    logp, entropy = token_logprobs(logits, torch.tensor([1]), vocab_size=3)
    (logp + entropy).sum().backward()
    assert logp.item() == pytest.approx(-1e4) and entropy.item() == 0 and logits.grad.isfinite().all()
