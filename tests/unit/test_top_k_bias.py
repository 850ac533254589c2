"""The generalised forms over the teacher's top-k end at the teacher; the truncated ones end where
the closed form says, and the renormalised one does not see the mass of the set.
"""

import math

import pytest
import torch

from benchmarks.top_k_bias import FORMS, make_pair, measure, reverse_renormalised

TEACHER, STUDENT = make_pair(24, seed=5)
CLOSE = 1e-6


@pytest.mark.parametrize("k", [1, 4, 24])
@pytest.mark.parametrize("name", ["reverse, generalised", "forward, generalised"])
def test_generalised_forms_end_at_the_teacher(name: str, k: int) -> None:
    _, slope, mass, inside = measure(FORMS[name], TEACHER, STUDENT, k)
    assert slope < 1e-12
    assert mass == pytest.approx(1, abs=CLOSE)
    assert inside == pytest.approx(0, abs=CLOSE)


@pytest.mark.parametrize("k", [1, 4])
def test_truncated_forms_end_at_another_mass(k: int) -> None:
    teacher_mass, slope, mass, inside = measure(FORMS["reverse, truncated"], TEACHER, STUDENT, k)
    # d/dz_j = p_j (1[j in K] - M) where the student is the teacher
    probs = TEACHER.softmax(0)
    expected = probs * ((probs >= probs.topk(k).values[-1]).double() - teacher_mass)
    assert slope == pytest.approx(expected.norm().item(), rel=1e-9)
    assert mass == pytest.approx(1 / math.e, abs=CLOSE)
    assert inside == pytest.approx(0, abs=CLOSE)
    _, forward_slope, forward_mass, _ = measure(FORMS["forward, truncated"], TEACHER, STUDENT, k)
    assert forward_slope == pytest.approx(slope, rel=1e-9)
    assert forward_mass == pytest.approx(1 / teacher_mass, abs=CLOSE)


def test_renormalised_form_does_not_see_the_mass() -> None:
    _, slope, mass, inside = measure(FORMS["reverse, renormalised"], TEACHER, STUDENT, 4)
    assert slope < 1e-12
    assert inside == pytest.approx(0, abs=CLOSE)
    assert abs(mass - 1) > 0.01
    student, teacher = (logits.log_softmax(0)[:4] for logits in (STUDENT, TEACHER))
    value = reverse_renormalised(student, teacher).item()
    assert reverse_renormalised(student - 3.0, teacher).item() == pytest.approx(value, rel=1e-12)
    assert value > 0.01


def test_all_forms_are_the_full_divergence_over_the_vocabulary() -> None:
    student, teacher = STUDENT.log_softmax(0), TEACHER.log_softmax(0)
    reverse = torch.nn.functional.kl_div(teacher, student, reduction="sum", log_target=True)
    forward = torch.nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)
    for name, form in FORMS.items():
        expected = reverse if name.startswith("reverse") else forward
        assert form(student, teacher).item() == pytest.approx(expected.item(), rel=1e-12), name
