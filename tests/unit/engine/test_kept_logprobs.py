"""Log-probs over kept sets on one rank against enumeration of the set in float64.

Ranks: tests/dist/test_sharded_logprobs.py.
"""

import itertools

import numpy as np
import pytest
import torch

from megatron_rl.engine import shards
from megatron_rl.engine.fused_logprobs import HeadSettings, fused_logprobs
from megatron_rl.engine.logprobs import token_logprobs
from megatron_rl.records.row_sets import sets_of_tokens
from megatron_rl.records.token_sets import TokenSets
from tests.unit.test_token_sets import make_mask


def enumerate_sets(logits, labels, sets, vocab, temperature):
    """(log pi~, H, H~, log mass) row by row; an empty set is the vocabulary.  logits float64."""
    rows = []
    for row, label, own in zip(logits / temperature, labels.tolist(), sets, strict=True):
        everything = row[:vocab].log_softmax(0)
        ids = list(range(vocab)) if own is None else own
        logp = everything[ids] - everything[ids].exp().sum().log()
        entropy, inside = (-(x.exp() * x).sum() for x in (everything, logp))
        rows.append(
            torch.stack(
                [logp[ids.index(label)], entropy, inside, everything[ids].exp().sum().log()]
            )
        )
    return torch.stack(rows, dim=1)


def make_case(seed, rows=24, vocab=47, most=6):
    """(labels, sets with None where empty, RowSets)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab, rows)
    mask, sets = make_mask(rng, labels, most, vocab)
    tokens = np.where(rng.random(rows) < 0.25, -1, np.arange(rows))
    known = [None if token < 0 else own.tolist() for token, own in zip(tokens, sets, strict=True)]
    return torch.from_numpy(labels), known, sets_of_tokens([mask], tokens)


@pytest.mark.parametrize("which", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize(
    ("temperature", "dtype"), [(1.0, "float64"), (0.7, "float64"), (0.7, "float32")]
)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("block_ids", [1, 7, 1 << 22])
def test_values_and_gradients(which, temperature, dtype, overwrite, block_ids, monkeypatch):
    monkeypatch.setattr("megatron_rl.records.row_sets.BLOCK_IDS", block_ids)
    monkeypatch.setitem(shards.BLOCK_BYTES, "cpu", 5 * 4 * 47)  # five rows at a time
    torch.manual_seed(0)
    labels, sets, kept = make_case(0)
    logits, weights = 4 * torch.randn(24, 50), torch.randn(2, 24, dtype=torch.float64)
    x, y = (
        logits.to(getattr(torch, dtype)).clone().requires_grad_(),
        logits.double().requires_grad_(),
    )
    got = token_logprobs(
        x, labels, kept, vocab_size=47, temperature=temperature, overwrite=overwrite
    )
    expected = enumerate_sets(y, labels, sets, 47, temperature)
    close = 1e-12 if dtype == "float64" else 5e-6
    for a, b in zip(got[:4], expected, strict=True):
        assert (a.double() - b).abs().max() <= close
    used = [index for index, name in enumerate(("logprobs", "entropy")) if which in ("both", name)]
    (grad,) = torch.autograd.grad([got[i] for i in used], x, [weights[i].to(x.dtype) for i in used])
    (expected_grad,) = torch.autograd.grad(
        [expected[i] for i in used], y, [weights[i] for i in used]
    )
    assert (grad.double() - expected_grad).abs().max() <= close
    if which == "logprobs":
        for row, own in enumerate(sets):
            outside = sorted(set(range(50)) - set(own or range(47)))
            assert (grad[row, outside] == 0).all(), "no gradient outside the set, exactly"


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("into_main_grad", [False, True])
def test_the_fused_lm_head_computes_the_same(chunk_rows, into_main_grad):
    torch.manual_seed(0)
    labels, sets, kept = make_case(1)
    hidden, head, weights = (
        torch.randn(24, 16).double(),
        torch.randn(50, 16).double(),
        torch.randn(2, 24).double(),
    )
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(50, 16).double(), False
    got = fused_logprobs(
        x,
        w,
        labels,
        kept,
        HeadSettings(
            vocab_size=47, temperature=0.8, chunk_rows=chunk_rows, into_main_grad=into_main_grad
        ),
    )
    y, v = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    expected = enumerate_sets(y @ v.t(), labels, sets, 47, 0.8)
    for a, b in zip(got[:4], expected, strict=True):
        assert (a - b).abs().max() <= 1e-11
    torch.autograd.backward(got[:2], list(weights))
    expected_grads = torch.autograd.grad(list(expected[:2]), [y, v], list(weights))
    for grad, expected_grad in zip(
        (x.grad, w.main_grad if into_main_grad else w.grad), expected_grads, strict=True
    ):
        assert (grad - expected_grad).abs().max() <= 1e-10


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_hook_of_an_overlapped_reduction_gets_a_gradient_that_adds_nothing(is_tied):
    """core's hook refuses weight.grad = None; it adds the gradient only with zero_out_wgrad."""
    labels, _, kept = make_case(1)
    head = torch.randn(50, 16).double().requires_grad_()
    head.main_grad, head.zero_out_wgrad = torch.zeros(50, 16).double(), is_tied
    settings = HeadSettings(vocab_size=47, into_main_grad=True, needs_grad=True)
    hidden = torch.randn(24, 16).double()
    fused_logprobs(hidden, head, labels, kept, settings).logprobs.sum().backward()
    assert head.grad_added_to_main_grad and head.main_grad.abs().max() > 0
    assert head.grad.shape == head.shape and (not is_tied or not head.grad.any())


def test_every_set_of_a_small_vocabulary():
    """All 15 subsets of 4 tokens, each with every label in it: probabilities of a set sum to 1,
    log-ratios are those of pi.
    """
    logits = torch.tensor([[0.3, -1.2, 2.0, 0.9]], dtype=torch.float64)
    full = logits.log_softmax(-1)[0]
    for size in range(1, 5):
        for own in itertools.combinations(range(4), size):
            labels = torch.tensor(own)
            mask = TokenSets.of(np.full(size, size), np.tile(own, size))
            found = token_logprobs(
                logits.repeat(size, 1),
                labels,
                sets_of_tokens([mask], np.arange(size)),
                vocab_size=4,
            )
            assert float(found.logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-14)
            torch.testing.assert_close(
                found.logprobs + found.log_mass, full[labels], rtol=0, atol=1e-14
            )
            assert found.log_mass.exp().tolist() == pytest.approx(
                [float(full[labels].exp().sum())] * size, abs=1e-14
            )


def test_the_complete_vocabulary_is_the_plain_log_prob_and_one_token_has_no_gradient():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 9).double(), torch.arange(5)
    everything = TokenSets.of(np.full(5, 9), np.tile(np.arange(9), 5))
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = token_logprobs(x, labels, sets_of_tokens([everything], np.arange(5)), vocab_size=9)
    expected = token_logprobs(y, labels, vocab_size=9)
    torch.testing.assert_close(got.logprobs, expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(got.kept_entropy, expected[1], rtol=0, atol=1e-14)
    weights = torch.randn(5).double()
    grads = [
        torch.autograd.grad(of, at, weights)[0] for of, at in ((got.logprobs, x), (expected[0], y))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-14)
    alone = TokenSets.of(np.ones(5, int), labels.numpy())
    x = logits.clone().requires_grad_()
    got = token_logprobs(x, labels, sets_of_tokens([alone], np.arange(5)), vocab_size=9)
    (grad,) = torch.autograd.grad(got.logprobs, x, weights)
    assert (got.logprobs == 0).all() and (got.kept_entropy == 0).all() and (grad == 0).all()
