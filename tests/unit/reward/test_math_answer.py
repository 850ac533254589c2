import pytest

from megatron_rl.reward import math_answer
from megatron_rl.reward.failures import LabelError
from megatron_rl.reward.math_answer import MAX_CHARACTERS, score


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("46", "46", 1),
        ("46.0", "46", 1),
        ("so the answer is 47", "46", 0),
        (r"$3$, no: \boxed{\frac{2}{4}}", "1/2", 1),
        ("$2\\sqrt{3}$", "2\\sqrt{3}", 1),  # a label in LaTeX without delimiters is one formula ...
        ("3", "2\\sqrt{3}", 0),  # ... not prose that ends in a number
        ("$x^2 + 1$", "1 + x^2", 1),
        ("1", "x^2+1", 0),
        (r"\boxed{7}", r"the answer is \boxed{7}", 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        ("", "46", 0),
        ("x" * 2 * MAX_CHARACTERS + " 46", "46", 1),
    ],
)
def test_math_answer(response, label, expected):
    assert score("", response, label) == expected


def test_a_label_without_mathematics_is_an_error_not_a_zero():
    with pytest.raises(LabelError, match="is not a mathematical expression"):
        score("", "46", "$$")


def test_the_label_of_a_gsm8k_solution_follows_the_mark():
    label = "She has 5 and 1 more = <<5+1=6>>6.\n#### 1,006"
    assert score("", "so it is 1006", label) == 1 and score("", "6", label) == 0


def test_what_math_verify_fails_on_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="integer string conversion"):
        score("", "9" * 5000, "46")


def test_a_comparison_that_fails_counts_where_no_other_one_holds(monkeypatch):
    def compare(label, answer, **options):
        if answer == "breaks":
            raise OverflowError("on purpose")
        return label == answer

    monkeypatch.setattr(math_answer, "verify", compare)
    assert math_answer.is_any_equal(["1"], ["breaks", "1"]) is True
    assert math_answer.is_any_equal(["1"], ["2", "3"]) is False
    with pytest.raises(OverflowError):
        math_answer.is_any_equal(["1"], ["breaks", "2"])
