"""A teacher's term through the real engine, in every kind of layout of two ranks, against float64
transformers for student and teacher: value and gradient of MiniRL's loss with

    A_t = A + beta (log pi_T - log pi_old)_t,

in the second update of a step, off policy, where log pi_theta is no longer log pi_old.  Sequences
of episodes lie in several micro-batches; some responses have no teacher.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.batch.pack import Sample
from megatron_rl.records import Rollout
from tests.dist.launch import run_ranks
from tests.dist.test_referee import GRADIENT_LIMIT, samples_of, save_gradients
from tests.families import family_checkpoint, load_reference
from tests.referee import Adam, Recipe, errors, response_logprobs, rollout_routes, saved

RECIPE = Recipe(lr=1e-4, clip_grad=1e9, temperature=1.0)
VALUE_LIMIT = 5e-6  # relative; of float32 sums
LAYOUTS = {
    "dp2": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "cp2-bshd": ({"cp": 2}, {"batch_format": "bshd"}),
    "pp2": ({"pp": 2}, {}),
    "ep2": ({"ep": 2}, {}),
    "tp2-ep2": ({"tp": 2, "ep": 2, "etp": 1}, {"fused_lm_head": True}),
}


@dataclass(frozen=True)
class Scored:
    """One sequence: log pi (with gradient), log pi_old, log mu, log pi_T [n], A, beta, episode."""

    logprobs: Tensor
    old: Tensor
    mu: Tensor
    teacher: Tensor
    advantage: float
    beta: float
    episode: str


def loss_of(sequences: list[Scored], *, at: str = "old") -> Tensor:
    """MiniRL (arXiv 2512.01374, Eq. 7) with a teacher's term.

    at: "old": the student's term is log pi_old; "none": no teacher; "gradient": the student's term
    is log pi_theta with its gradient, a mistake.
    """
    total = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        student = {"old": s.old, "none": s.teacher, "gradient": s.logprobs}[at]
        advantage = s.advantage + s.beta * (s.teacher - student)
        ratio = (s.logprobs.detach() - s.old).exp()
        dropped = torch.where(advantage > 0, ratio > 1.27, ratio < 0.8)
        weight = (s.logprobs.detach() - s.mu).exp().clamp(max=5.0)
        total = total + (torch.where(dropped, 0.0, weight) * advantage * s.logprobs).sum()
    return -total / len({s.episode for s in sequences})


def logprobs_of(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    return response_logprobs(model, rollout, 1.0, rollout_routes(rollout))[0]


def teacher_of(rollout: Rollout) -> Tensor:
    if rollout.teacher_logprobs is None:
        return torch.zeros(rollout.response_length, dtype=torch.float64)
    return torch.from_numpy(rollout.teacher_logprobs).double()


def teachers_samples(root: Path) -> list[Sample]:
    """Samples with the log-probs that the teacher's own routers give, as a server returns them."""
    teacher = load_reference(root / "teacher", torch.float64)
    samples = []
    with torch.no_grad():
        for index, sample in enumerate(samples_of(root / "student")):
            logprobs = [
                response_logprobs(teacher, r, 1.0, None)[0].float().numpy()
                for r in sample.rollout.sequences
            ]
            if index % 5 == 4:  # a response whose source has no teacher
                samples.append(sample)
                continue
            beta = 0.0 if index % 5 == 3 else 0.7  # teach = failures
            rollout = sample.rollout.with_teacher(logprobs)
            samples.append(replace(sample, rollout=rollout, teacher_weight=beta))
    return samples


def expected_of(root: Path, samples: list[Sample]) -> tuple[dict[str, Tensor], float, list[float]]:
    """(gradient of the second update, value of its loss, errors of the mistakes)."""
    model = load_reference(root / "student", torch.float64)
    with torch.no_grad():
        olds = {r.id: logprobs_of(model, r) for s in samples for r in s.rollout.sequences}

    def scored() -> list[Scored]:
        return [
            Scored(
                logprobs_of(model, r),
                olds[r.id],
                torch.from_numpy(r.rollout_logprobs).double(),
                teacher_of(r),
                sample.advantage,
                sample.teacher_weight,
                sample.rollout.id,
            )
            for sample in samples
            for r in sample.rollout.sequences
        ]

    loss_of(scored()).backward()
    Adam(model, RECIPE).step()

    def gradient(at: str) -> tuple[dict[str, Tensor], float]:
        model.zero_grad()
        loss = loss_of(scored(), at=at)
        loss.backward()
        return saved(model, gradients=True), float(loss.detach())

    right, value = gradient("old")
    mistakes = [max(errors(gradient(at)[0], right).values()) for at in ("none", "gradient")]
    return right, value, mistakes


def run_layouts(root: Path, samples: list[Sample]) -> dict[str, float]:
    """On a rank: layout -> value of the loss in the second update; gradients go to files."""
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    adam = dict(
        beta1=0.9, beta2=0.95, lr=RECIPE.lr, eps=RECIPE.eps, weight_decay=RECIPE.weight_decay
    )
    values = {}
    for layout, (parallel, model) in LAYOUTS.items():
        engine = make_engine(
            root / "student", parallel=parallel, model=model,
            optim={**adam, "clip_grad": RECIPE.clip_grad}, loss={"name": "minirl"},
            measure=False, rollout={"temperature": 1.0},
        )  # fmt: skip
        place = engine.parallel
        batch = make_mini_batch(
            samples[place.dp_rank :: place.dp_size],
            max_tokens=25,
            rule=engine.pack_rule,
            dp_group=place.dp_group,
        )
        old = engine.old_logprobs(batch, MetricSums(), replay="R3")
        engine.update(batch, old, MetricSums(), replay="R3")
        sums = MetricSums()
        engine.compute_gradient(batch, old, sums, replay="R3")
        save_gradients(engine, root / f"{layout}.gradient")
        values[layout] = sums.reduce(dist.group.WORLD, place.device)["train/loss"]
        place.destroy()
    dist.destroy_process_group()
    return values


@pytest.mark.timeout(600)
def test_value_and_gradient_are_those_of_the_formula(tmp_path: Path) -> None:
    family_checkpoint(tmp_path / "student", "qwen3_moe", num_hidden_layers=4)
    family_checkpoint(tmp_path / "teacher", "qwen3_moe", num_hidden_layers=4, seed=7)
    samples = teachers_samples(tmp_path)
    expected, value, mistakes = expected_of(tmp_path, samples)
    assert min(mistakes) > 100 * GRADIENT_LIMIT, f"the teacher's term hardly matters: {mistakes}"
    losses = run_ranks(run_layouts, 2, tmp_path, samples, timeout=500)
    failures = []
    for layout in LAYOUTS:
        off = errors(load_file(tmp_path / f"{layout}.gradient"), expected)
        worst = max(off, key=lambda name: off[name])
        print(
            f"{layout}: gradient off by {off[worst]:.2g} ({worst}), value by "
            f"{abs(losses[0][layout] / value - 1):.2g}"
        )
        if off[worst] > GRADIENT_LIMIT:
            failures.append(f"{layout}: {worst} is off by {off[worst]:.2g}")
        if abs(losses[0][layout] / value - 1) > VALUE_LIMIT:
            failures.append(f"{layout}: loss {losses[0][layout]} instead of {value}")
    assert not failures, "\n".join(failures)
