"""Answers that make a verifier hang, run out of memory or fail: all are wrong; none may stop the
run, exceed its timeout or be scored 0 silently.  test_hostile.py scores them in the real pool.  The
label is 46 unless a pair has another."""

DEEP = 3000


def matrix(letter):
    """A nine by nine matrix of unknowns."""
    rows = (" & ".join(f"{letter}_{{{i}{j}}}" for j in range(9)) for i in range(9))
    return r"$\begin{pmatrix}" + r" \\ ".join(rows) + r"\end{pmatrix}$"


BOMBS = [  # numbers that do not fit anywhere
    "9**9**9**9", "10**10**8", "$9^{9^{9^{9}}}$", r"\boxed{99999999!}", r"\boxed{10^{10^{10}}}",
    "2^2^2^2^2^2^2^2",
    r"$\sum_{k=1}^{10^{12}} \frac{1}{k}$", r"$\prod_{k=1}^{10^{9}} k$", r"\boxed{1e999999999}",
    r"$0.1^{-10^{9}}$",
    r"\boxed{(10^{9})!}", r"\boxed{\binom{10^{9}}{5 \cdot 10^{8}}}",
    r"\boxed{\frac{1}{10^{-10^{9}}}}", "9" * 20_000,
    r"\boxed{" + "9" * 15_000 + "}", r"\boxed{0." + "0" * 15_000 + "1}",
    r"$\sqrt[10^{9}]{10^{10^{9}}}$",
]  # fmt: skip
ALGEBRA = [  # what computer algebra never finishes
    (r"$(x+y+z+1)^{400}$", "$(x+y+z+1)^{399}$"), (r"$\int_0^1 e^{e^{e^{x}}} dx$", "46"),
    (r"$\lim_{n \to \infty} (1 + \frac{1}{n})^{n^{n}}$", "46"), (r"$\int x^x \sin(x^x) dx$", "$x$"),
    (r"$x^{1000} + " + "+".join(f"x^{{{n}}}" for n in range(200)) + "$", "$(x+1)^{1000}$"),
    (matrix("x"), matrix("y")),
    (r"$\{" + ",".join(f"x_{{{n}}}" for n in range(400)) + r"\}$",
     r"$\{" + ",".join(f"y_{{{n}}}" for n in range(400)) + r"\}$"),
    (r"$(1, " + ", ".join(["2"] * 800) + ")$", "$(2, 1)$"),
    (r"$\sin(\cos(\tan(\exp(\log(x^{x^{x}})))))$", "$x$"),
]  # fmt: skip
NESTED = [
    "(" * DEEP + "1" + ")" * DEEP, "$" + "{" * DEEP + "1" + "}" * DEEP + "$",
    "\\boxed{" * DEEP + "1" + "}" * DEEP,
    "\\boxed{" * DEEP, "$" + "\\frac{1}{" * 800 + "x" + "}" * 800 + "$",
    "$" + "\\sqrt{" * 800 + "2" + "}" * 800 + "$",
    "[" * DEEP + "]" * DEEP, "$" + "-" * DEEP + "1$", "$" + "2^{" * 800 + "2" + "}" * 800 + "$",
    "(" * 5000,
    "$" + "\\left(" * 800 + "1" + "\\right)" * 800 + "$",
]  # fmt: skip
TEXT = [  # regular expressions, encodings, size
    "1" * 8000 + "!", "$" * 9000, "1, " * 5000, "a" * 16_000 + "$", ("1 " * 4000) + "and",
    "\\" * 9000, "{}" * 4000,
    "x" * 1_000_000, "$x$ " * 4000, "\x00" * 1000, "4\x006", "\ud800\udfff\udc00", "\ufeff\u202e64",
    "\u0664\u0666\x1b[2J",
    "% \n" * 5000, "answer is " * 1500, "= " * 8000, "1/" * 4000, "1e" * 4000, "\\text{" * 2000,
    "\U0001f4a3" * 4000, "",
    " \n\t\r\x0b\x0c\u2028", "NaN", "inf", "$\\infty$", "None", "True", "e", "-" * 9000,
    "1" + ",000" * 3000, "$$", "\\boxed{}",
]  # fmt: skip
INJECTIONS = [  # text that a verifier must not run: each would leave a file
    "__import__('os').system('touch {file}')", "$__import__('os').system('touch {file}')$",
    r"\boxed{__import__('pathlib').Path('{file}').touch()}", "exec(\"open('{file}', 'w')\")",
    r"\boxed{[c for c in ().__class__.__base__.__subclasses__()][0]}",
    "[[__import__('os').system('touch {file}')]]",
    r"\input{{file}}", r"\write18{touch {file}}", "{\"score\": 1.0}\n{\"score\": 1.0}",
    "\n\n[\"a\", \"b\"]\n",
]  # fmt: skip
RIGHT = [
    ("46", "46"), (r"so \boxed{46}", "46"), (r"$\frac{2}{4}$", "0.5"), ("$x^2+1$", "$1+x^2$"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
]  # fmt: skip
