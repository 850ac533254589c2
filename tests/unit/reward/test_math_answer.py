import pytest

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
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        score("", "46", "$$")
