"""Log-probs of a teacher's most probable tokens on one rank against float64 autograd, and the
divergences that are summed over them.

Ranks: tests/dist/test_sharded_logprobs.py, tests/dist/test_distillation.py.
"""

import numpy as np
import pytest
import torch

from benchmarks.top_k_bias import FORMS
from megatron_rl.engine import shards
from megatron_rl.engine.fused_logprobs import HeadSettings, fused_logprobs
from megatron_rl.engine.logprobs import token_logprobs
from megatron_rl.loss.teacher import teacher_divergence
from megatron_rl.records.row_sets import top_of_rows
from megatron_rl.records.teacher_scores import TeacherTop
from tests.unit.engine.test_kept_logprobs import enumerate_sets, make_case

ROWS, VOCAB, K = 24, 47, 5


def make_top(seed: int, k: int = K, rows: int = ROWS):
    """(teacher's log-probs [ROWS, VOCAB] float64, ids [ROWS] with None for rows without a teacher,
    TopRows).
    """
    rng = torch.Generator().manual_seed(seed)
    teacher = (2 * torch.randn(rows, VOCAB, generator=rng).double()).log_softmax(1)
    values, ids = teacher.topk(k)
    top = TeacherTop.of(ids.numpy(), values.float().numpy())
    index = np.where(torch.rand(rows, generator=rng).numpy() < 0.25, -1, np.arange(rows))
    known = [None if at < 0 else ids[row].tolist() for row, at in enumerate(index)]
    return teacher, known, top_of_rows([top], index)


def expected_top(logits, known, temperature):
    """Log-probs of the ids, row after row, ascending in a row."""
    logprobs = (logits[:, :VOCAB] / temperature).log_softmax(1)
    return torch.cat([logprobs[r, sorted(ids)] for r, ids in enumerate(known) if ids is not None])


@pytest.mark.parametrize("with_kept", [False, True])
@pytest.mark.parametrize("which", ["top", "all"])
@pytest.mark.parametrize(("temperature", "dtype"), [(1.0, "float64"), (0.7, "float32")])
@pytest.mark.parametrize("block_ids", [1, 1 << 22])
def test_values_and_gradients(with_kept, which, temperature, dtype, block_ids, monkeypatch):
    monkeypatch.setattr("megatron_rl.records.row_sets.BLOCK_IDS", block_ids)
    monkeypatch.setitem(shards.BLOCK_BYTES, "cpu", 5 * 4 * VOCAB)  # five rows at a time
    torch.manual_seed(0)
    labels, sets, kept = make_case(0)
    if not with_kept:
        sets, kept = [None] * ROWS, None
    _, known, top = make_top(1)
    logits = 4 * torch.randn(ROWS, 50)
    x = logits.to(getattr(torch, dtype)).clone().requires_grad_()
    y = logits.double().requires_grad_()
    got = token_logprobs(
        x, labels, kept, vocab_size=VOCAB, temperature=temperature, overwrite=True, top=top.sets
    )
    expected = expected_top(y, known, temperature)
    weights = torch.randn(len(expected), dtype=torch.float64)
    loss = (got.top * weights.to(x.dtype)).sum()
    right = (expected * weights).sum()
    if which == "all":
        loss = loss + got.logprobs.sum() + 0.3 * got.entropy.sum()
        others = enumerate_sets(y, labels, sets, VOCAB, temperature)
        right = right + others[0].sum() + 0.3 * others[1].sum()
    close = 1e-12 if dtype == "float64" else 5e-6
    assert (got.top.double() - expected).abs().max() <= close
    (grad,) = torch.autograd.grad(loss, x)
    (expected_grad,) = torch.autograd.grad(right, y)
    assert (grad.double() - expected_grad).abs().max() <= 10 * close
    assert (grad[:, VOCAB:] == 0).all(), "padding columns have no gradient"


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("into_main_grad", [False, True])
def test_the_fused_lm_head_computes_the_same(chunk_rows, into_main_grad):
    torch.manual_seed(0)
    _, known, top = make_top(2)
    labels = torch.randint(0, VOCAB, (ROWS,))
    hidden, head = torch.randn(ROWS, 16).double(), torch.randn(50, 16).double()
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(50, 16).double(), False
    settings = HeadSettings(
        vocab_size=VOCAB, temperature=0.8, chunk_rows=chunk_rows, into_main_grad=into_main_grad
    )
    got = fused_logprobs(x, w, labels, None, settings, top.sets)
    y, v = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    expected = expected_top(y @ v.t(), known, 0.8)
    assert (got.top - expected).abs().max() <= 1e-11
    weights = torch.randn(len(expected)).double()
    (got.top * weights).sum().backward()
    grads = torch.autograd.grad((expected * weights).sum(), [y, v])
    found = (x.grad, w.main_grad if into_main_grad else w.grad)
    for grad, expected_grad in zip(found, grads, strict=True):
        assert (grad - expected_grad).abs().max() <= 1e-10


@pytest.mark.parametrize("form", ["reverse", "forward"])
def test_divergences_are_the_generalised_forms_of_the_enumeration(form):
    teacher, known, top = make_top(3)
    logits = torch.randn(ROWS, VOCAB).double()
    student = expected_top(logits, known, 1.0)
    got = teacher_divergence(student, top, form, ROWS)
    for row, ids in enumerate(known):
        expected = 0.0
        if ids is not None:
            own = logits[row].log_softmax(0)[ids]
            expected = FORMS[f"{form}, generalised"](own, teacher[row, ids])
        assert got[row] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("form", ["reverse", "forward"])
def test_the_whole_vocabulary_gives_the_kl(form):
    teacher, known, top = make_top(4, k=VOCAB)
    student = torch.randn(ROWS, VOCAB).double().log_softmax(1)
    got = teacher_divergence(expected_top(student, known, 1.0), top, form, ROWS)
    p, q = (student, teacher) if form == "reverse" else (teacher, student)
    expected = (p.exp() * (p - q)).sum(1)
    for row, ids in enumerate(known):
        assert got[row] == pytest.approx(0 if ids is None else expected[row].item(), abs=1e-5)


def test_a_student_that_is_the_teacher_has_no_divergence_and_no_gradient():
    teacher, _, top = make_top(5)
    logits = teacher.float().requires_grad_()
    got = token_logprobs(
        logits, torch.zeros(ROWS, dtype=torch.long), None, vocab_size=VOCAB, top=top.sets
    )
    for form in ("reverse", "forward"):
        divergence = teacher_divergence(got.top, top, form, ROWS)
        assert divergence.abs().max() < 1e-6
        (grad,) = torch.autograd.grad(divergence.sum(), logits, retain_graph=True)
        assert grad.abs().max() < 1e-6


def test_values_that_are_not_finite_add_nothing():
    teacher, known, top = make_top(6)
    student = expected_top(teacher, known, 1.0).requires_grad_()
    broken = torch.where(torch.arange(len(student)) == 3, float("nan"), student)
    divergence = teacher_divergence(broken, top, "reverse", ROWS)
    (grad,) = torch.autograd.grad(divergence.sum(), student)
    assert torch.isfinite(divergence).all() and torch.isfinite(grad).all()


def test_no_tokens_at_all():
    one = TeacherTop.of(np.array([[1, 2]]), np.zeros((1, 2), np.float32))
    top = top_of_rows([one], np.full(4, -1))
    got = token_logprobs(
        torch.randn(4, VOCAB),
        torch.zeros(4, dtype=torch.long),
        None,
        vocab_size=VOCAB,
        top=top.sets,
    )
    assert got.top.shape == (0,)
    assert teacher_divergence(got.top, top, "forward", 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("m", [0.01, 0.5, 0.9, 0.97])
def test_the_pull_on_the_mass_of_the_tokens_is_that_of_the_guide(m):
    """docs/guides/distillation.md: the student gives mass m to the teacher's K tokens, M by the
    teacher, and is the teacher within K and outside.
    """
    teacher = (2 * torch.randn(1, VOCAB, dtype=torch.float64)).log_softmax(1)
    values, ids = teacher.topk(K)
    mass = values.exp().sum().item()
    is_top = torch.zeros(VOCAB).scatter(0, ids[0], 1.0).bool()
    odds = torch.tensor(m / (1 - m), dtype=torch.float64).log().requires_grad_()
    inside, outside = odds.sigmoid(), 1 - odds.sigmoid()
    student = torch.where(is_top, inside / mass, outside / (1 - mass)).log() + teacher[0]
    log_ratio, log_rest = np.log(m / mass), np.log((1 - m) / (1 - mass))
    expected = {
        ("reverse", K): m * (1 - m) * log_ratio,
        ("forward", K): (m - mass) * (1 - m),
        ("reverse", VOCAB): m * (1 - m) * (log_ratio - log_rest),
        ("forward", VOCAB): m - mass,
    }
    for (form, k), pull in expected.items():
        values, ids = teacher.topk(k)
        top = top_of_rows([TeacherTop.of(ids.numpy(), values.numpy())], np.zeros(1, int))
        divergence = teacher_divergence(student[ids[0].sort().values], top, form, 1)
        (grad,) = torch.autograd.grad(divergence.sum(), odds, retain_graph=True)
        assert grad.item() == pytest.approx(pull, rel=1e-4, abs=1e-6), (form, k)
