"""Find the student at which losses over the teacher's top-k tokens end, by enumeration.

    OMP_NUM_THREADS=1 python -m benchmarks.top_k_bias [--vocabulary 64] [--seeds 3] [--k 1 4 16]

One next token, student p_S and teacher p_T over a small vocabulary, K the k most probable tokens of
the teacher, M their mass p_T(K), all in float64.  Sums run over v in K, of probabilities as they
are, not renormalised:

    reverse, truncated      sum p_S (log p_S - log p_T)                minimum at p_S(K) = M / e
    reverse, renormalised   KL(p_S(.|K) || p_T(.|K))                   does not see p_S(K)
    reverse, generalised    sum p_S (log p_S - log p_T) - p_S + p_T    minimum at p_S = p_T on K
    forward, truncated      sum p_T (log p_T - log p_S)                minimum at p_S(K) = 1
    forward, generalised    sum p_T (log p_T - log p_S) - p_T + p_S    minimum at p_S = p_T on K

The third is MOPD's (arXiv 2606.30406, Eq. 5); the last is the same with p_S and p_T exchanged.
The truncated reverse form at p_S = m p_T(.|K) on K is m log(m / M), with its minimum at m = M / e.

    slope    |d loss / d logits| where the student is the teacher: 0 without bias
    mass     p_S(K) / M where L-BFGS ends, from a student that is not the teacher: 1 without bias
    inside   KL(p_S(.|K) || p_T(.|K)) where it ends

Numbers are means over seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

TEACHER_STD, GAP_STD = 2.5, 1.0
"""Standard deviations of the teacher's logits, and of student - teacher."""
ITERATIONS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--k", nargs="+", type=int, default=[1, 4, 16])
    args = parser.parse_args()
    pairs = [make_pair(args.vocabulary, seed) for seed in range(args.seeds)]
    print("| form | k | M | slope | mass | inside |\n|---|---|---|---|---|---|")
    for name, form in FORMS.items():
        for k in args.k:
            rows = [measure(form, teacher, student, k) for teacher, student in pairs]
            teacher_mass, slope, mass, inside = map(fmean, zip(*rows, strict=True))
            texts = (short(value) for value in (slope, mass, inside))
            print(f"| {name} | {k} | {teacher_mass:.3f} | {' | '.join(texts)} |")
    return 0


def make_pair(vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the logits of teacher and student, float64 [vocabulary] each."""
    rng = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, vocabulary, generator=rng, dtype=torch.float64)
    teacher = TEACHER_STD * normal[0]
    return teacher, teacher + GAP_STD * normal[1]


# Forms: (log p_S, log p_T), float64 [k] each, of the teacher's top-k tokens -> loss ---------------


def reverse_truncated(student: Tensor, teacher: Tensor) -> Tensor:
    return (student.exp() * (student - teacher)).sum()


def reverse_renormalised(student: Tensor, teacher: Tensor) -> Tensor:
    return reverse_truncated(student.log_softmax(0), teacher.log_softmax(0))


def reverse_generalised(student: Tensor, teacher: Tensor) -> Tensor:
    return reverse_truncated(student, teacher) - student.exp().sum() + teacher.exp().sum()


def forward_truncated(student: Tensor, teacher: Tensor) -> Tensor:
    return reverse_truncated(teacher, student)


def forward_generalised(student: Tensor, teacher: Tensor) -> Tensor:
    return reverse_generalised(teacher, student)


Form = Callable[[Tensor, Tensor], Tensor]
FORMS: dict[str, Form] = {
    "reverse, truncated": reverse_truncated,
    "reverse, renormalised": reverse_renormalised,
    "reverse, generalised": reverse_generalised,
    "forward, truncated": forward_truncated,
    "forward, generalised": forward_generalised,
}


# Measured -----------------------------------------------------------------------------------------


def measure(
    form: Form, teacher_logits: Tensor, student_logits: Tensor, k: int
) -> tuple[float, float, float, float]:
    """Return (M, slope, mass, inside), see the module."""
    teacher, ids = teacher_logits.log_softmax(0).topk(k)
    mass = teacher.exp().sum()
    logits = teacher_logits.clone().requires_grad_()
    (slope,) = torch.autograd.grad(form(logits.log_softmax(0)[ids], teacher), logits)
    end = minimise(lambda logits: form(logits.log_softmax(0)[ids], teacher), student_logits)
    student = end.log_softmax(0)[ids]
    inside = reverse_renormalised(student, teacher)
    end_mass = student.exp().sum() / mass
    return mass.item(), slope.norm().item(), end_mass.item(), inside.item()


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the logits, float64 [V], where L-BFGS from `start` ends."""
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits],
        max_iter=ITERATIONS,
        max_eval=2 * ITERATIONS,
        tolerance_grad=1e-10,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(logits)
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach()


def short(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
