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


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"\boxed{1\times10^{-27}}", r"1.67\times10^{-27}"),
        (r"\boxed{6.6\times10^{-34}}", r"6.626\times10^{-34}"),
        (r"\boxed{5\times10^{-18}}", r"9\times10^{-19}"),
        (r"\boxed{-3\times10^{-20}}", r"1.6\times10^{-19}"),
        (r"\boxed{9.1\times10^{-31}\text{ kg}}", r"1.67\times10^{-27}\text{ kg}"),
        (r"\boxed{\pi\cdot10^{-20}}", r"3\cdot10^{-20}"),
        (r"\boxed{\frac{1}{2^{99}}}", r"\frac{1}{2^{100}}"),
        (r"\boxed{\frac{1}{52!}}", r"\frac{1}{53!}"),
        (r"\boxed{\frac{3}{10^{400}}}", r"\frac{2}{10^{400}}"),
        (r"\boxed{2^{-60}}", "2^{-61}"),
        (r"\boxed{10^{-20}}", "10^{-21}"),
        (r"\boxed{e^{-50}}", "e^{-49}"),
        ("0.0000002", "0.0000001"),
        ("0.0000011", "0.0000012"),
        ("0.00000049", "0.00000001"),
        ("0.0000001", "0"),
        ("0", "0.0000001"),
        ("0.33", r"\frac13"),
    ],
)
def test_a_small_number_is_not_another_small_number(response, label):
    """math-verify compares six decimals, and chops what is near 0."""
    assert score("", response, label) == 0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("0.333333", r"\frac13"),
        ("0.016667", r"\frac{1}{60}"),
        ("0.001667", r"\frac{1}{600}"),
        ("0.000333333", r"\frac{1}{3000}"),
        (r"\boxed{1.67\times10^{-27}}", "0.00000000000000000000000000167"),
        (r"\boxed{1.67\times10^{-27}\text{ kg}}", r"1.67\times10^{-27}"),
        (r"\boxed{1.60218\times10^{-19}}", r"1.602177\times10^{-19}"),
        (r"\boxed{\frac{1}{1267650600228229401496703205376}}", r"\frac{1}{2^{100}}"),
        (r"\boxed{\frac{\pi}{10^{9}}}", r"\pi\times10^{-9}"),
        (r"\boxed{10^{-9}i}", r"i\times10^{-9}"),
        (r"\boxed{x\cdot10^{-9}}", "10^{-9}x"),
        (r"\boxed{x=10^{-9}}", "10^{-9}"),
        (r"\boxed{\{10^{-9},1\}}", r"\{1,10^{-9}\}"),
        (r"\boxed{\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}}", "0"),
        ("-0", "0.0"),
        ("75%", "0.75"),
        ("0.75", "75%"),
        (r"\boxed{0.00001\%}", r"0.00001\%"),
        (r"\boxed{\infty}", r"\infty"),
        (r"\boxed{3^{3^{3^{3}}}}", "3^{3^{3^{3}}}"),
    ],
)
def test_small_numbers_that_agree_in_six_digits_are_equal(response, label):
    assert score("", response, label) == 1


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{0.00001}", "1e-05", 1),
        (r"\boxed{10^{-5}}", "1e-05", 1),
        (r"\boxed{1e-5}", "1e-05", 1),
        ("1e-05", "0.00001", 1),
        (r"\boxed{e-5}", "1e-05", 0),  # as math-verify reads the label
        (r"\boxed{10000000000000000}", "1e+16", 1),
        (r"\boxed{-2.5e-6}", "-0.0000025", 1),
        (r"\boxed{2e-1}", "0.2", 0),
        (r"\boxed{-1+2e}", "2e-1", 1),
    ],
)
def test_numbers_with_an_exponent(response, label, expected):
    assert score("", response, label) == expected


@pytest.mark.parametrize("label", [r"\$18.90", r"18.90\$", "$18.90$", "$18.90"])
def test_the_dollar_of_an_amount_delimits_no_formula(label):
    assert score("", r"\boxed{18.9}", label) == score("", r"\boxed{\$18.90}", label) == 1
    assert score("", r"\boxed{18}", label) == score("", r"\boxed{0.9}", label) == 0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{3}. Wait, I made an error. The answer is \boxed{4}", "4", 1),
        (r"\boxed{3}. Wait, I made an error. The answer is \boxed{4}", "3", 0),
        (r"\boxed{3}. Wait, I made an error. The answer is \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{x=3} and \boxed{x=4}", "x=4", 1),
        (r"\boxed{3} or \boxed{4}", "3,4", 1),
        (r"\boxed{3} or \boxed{4}", r"\{4\}", 0),
        (r"\boxed{3} or \boxed{-2}", r"\pm 2", 0),
        (r"\boxed{5}, \boxed{3}, \boxed{4}", "3,4", 0),
        (r"\boxed{1} and \boxed{(2,3)}", "(2,3)", 0),
    ],
)
def test_the_last_of_several_boxes_is_the_final_answer_unless_the_label_is_a_list(
    response, label, expected
):
    assert score("", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{1010_2}", "1010_2", 1),
        (r"\boxed{1010}", "1010_2", 1),  # the question names the base
        (r"\boxed{1010_3}", "1010_{2}", 0),
        (r"\boxed{10}", "1010_2", 0),
        (r"so it is $2516_{7}$", "$2516_8$", 0),
        (r"\boxed{\text{FF}_{16}}", "FF_{16}", 1),
        (r"\boxed{FF_{8}}", "FF_{16}", 0),
        (r"\boxed{4A1_{12}}", "1A4_{12}", 0),  # for math-verify the product a 1 4
        (r"\boxed{x=1010_2}", "1010_2", 1),
        (r"\boxed{x_2}", "x_1", 0),
    ],
)
def test_a_numeral_with_a_base_is_compared_by_digits_and_base(response, label, expected):
    assert score("", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{6.02\times10^{23}}", "6.02e23", 1),
        (r"\boxed{602000000000000000000000}", "6.02e23", 1),
        (r"\boxed{6.02e23}", r"6.02\times10^{23}", 1),
        (r"\boxed{6.02e23}", "$6.02e23$", 1),
        (r"\boxed{6.02e23}", r"\boxed{6.02e23}", 1),
        (r"\boxed{6.02e23 \text{ mol}}", r"6.02e23 \text{ mol}", 1),
        ("so it is 1.5e3.", "1500", 1),
        ("so it is 1.5e3.", "1.5", 0),
        (r"\boxed{20}", "2e+1", 0),  # twice Euler's number and 1
        (r"\boxed{(1e-8,1)}", "(1e-9,1)", 0),
    ],
)
def test_a_number_with_an_exponent_is_read_in_a_formula_and_in_a_text(response, label, expected):
    assert score("", response, label) == expected


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("x={}", "x={}"),
        ("x={}", "{}"),
        ("{}", "x={}"),
        ("x<{}", "x<{}"),
        ("{},5", "5,{}"),
        (r"\{{{},1\}}", r"\{{1,{}\}}"),
        ("[0,{}]", "[0,{}]"),
        ("({},1)", "({},1)"),
        ("m={}, n=1", "n=1, m={}"),
        (r"\begin{{pmatrix}}{}\\1\end{{pmatrix}}", r"\begin{{pmatrix}}{}\\1\end{{pmatrix}}"),
    ],
)
def test_small_numbers_in_equations_lists_and_sets_are_compared_in_six_digits(label, answer):
    first, second = r"1.67\times10^{-27}", r"1\times10^{-27}"
    box = r"\boxed{" + answer.format(first) + "}"
    assert score("", box, label.format(first)) == 1
    assert score("", box, label.format(second)) == 0
