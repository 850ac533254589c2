"""A teacher's term through the real engine, in every kind of layout of two ranks, against float64
transformers for student and teacher: value and gradient of MiniRL's loss with

    A_t = A + beta (log pi_T - log pi_old)_t,

in the second update of a step, off policy, where log pi_theta is no longer log pi_old, and with the
divergences over the teacher's most probable tokens in its place.  Sequences of episodes lie in
several micro-batches; some responses have no teacher.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.batch.pack import Sample
from megatron_rl.records import Rollout
from megatron_rl.records.teacher_scores import TeacherScores, TeacherTop
from tests.dist.launch import run_ranks
from tests.dist.test_referee import GRADIENT_LIMIT, samples_of, save_gradients
from tests.families import family_checkpoint, load_reference
from tests.referee import (
    Adam,
    Recipe,
    errors,
    response_distributions,
    response_logprobs,
    rollout_routes,
    saved,
)

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


FORMS = ("token", "reverse", "forward")
TOP_K = 5


@dataclass(frozen=True)
class Scored:
    """One sequence: log pi (with gradient), log pi_old, log mu, log pi_T [n], A, beta, episode; the
    teacher's tokens [n, K] with its log-probs, and log pi of them (with gradient).
    """

    logprobs: Tensor
    old: Tensor
    mu: Tensor
    teacher: Tensor
    advantage: float
    beta: float
    episode: str
    top: Tensor
    student_top: Tensor


def loss_of(sequences: list[Scored], *, at: str = "token") -> Tensor:
    """MiniRL (arXiv 2512.01374, Eq. 7) with a teacher's term.

    at: "token": the student's term is log pi_old; "none": no teacher; "gradient": the student's
    term is log pi_theta with its gradient, a mistake; "reverse", "forward": a divergence over the
    teacher's tokens (arXiv 2606.30406, Eq. 5); "truncated": the reverse one without its last two
    terms, a mistake.
    """
    total = torch.zeros((), dtype=torch.float64)
    for s in sequences:
        advantage = s.advantage
        if at in ("token", "gradient"):
            student = {"token": s.old, "gradient": s.logprobs}[at]
            advantage = s.advantage + s.beta * (s.teacher - student)
        elif at != "none":
            total = total - s.beta * divergence_of(s, at).sum()
        advantage = torch.as_tensor(advantage, dtype=torch.float64)
        ratio = (s.logprobs.detach() - s.old).exp()
        dropped = torch.where(advantage > 0, ratio > 1.27, ratio < 0.8)
        weight = (s.logprobs.detach() - s.mu).exp().clamp(max=5.0)
        total = total + (torch.where(dropped, 0.0, weight) * advantage * s.logprobs).sum()
    return -total / len({s.episode for s in sequences})


def divergence_of(s: Scored, form: str) -> Tensor:
    """[n, K]"""
    p_s, p_t = s.student_top.exp(), s.top.exp()
    return {
        "reverse": p_s * (s.student_top - s.top) - p_s + p_t,
        "forward": p_t * (s.top - s.student_top) - p_t + p_s,
        "truncated": p_s * (s.student_top - s.top),
    }[form]


def metrics_of(sequences: list[Scored], form: str) -> dict[str, float]:
    """Means over the tokens that are taught; {} for the token form."""
    taught = [s for s in sequences if s.beta]
    if form == "token":
        return {}
    columns = {
        "teacher/divergence": [divergence_of(s, form) for s in taught],
        "teacher/top_mass_student": [s.student_top.exp() for s in taught],
        "teacher/top_mass_teacher": [s.top.exp() for s in taught],
    }
    return {name: float(torch.cat(c).sum(1).mean().detach()) for name, c in columns.items()}


def logprobs_of(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    return response_logprobs(model, rollout, 1.0, rollout_routes(rollout))[0]


def top_of(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """The teacher's tokens [n, K] and their log-probs; tokens of log-prob 0 without a teacher."""
    top, shape = rollout.teacher_top, (rollout.response_length, TOP_K)
    if top is None:
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.float64)
    ids = torch.from_numpy(top.sets.ids()).view(shape)
    return ids, torch.from_numpy(top.logprobs).double().view(shape)


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
            scores = [scores_of(teacher, r) for r in sample.rollout.sequences]
            if index % 5 == 4:  # a response whose source has no teacher
                samples.append(sample)
                continue
            beta = 0.0 if index % 5 == 3 else 0.7  # teach = failures
            rollout = sample.rollout.with_teacher(scores)
            samples.append(replace(sample, rollout=rollout, teacher_weight=beta))
    return samples


def scores_of(teacher: torch.nn.Module, rollout: Rollout) -> TeacherScores:
    """Return the float32 log-probs of the sampled tokens and of the most probable ones, as a server
    does.
    """
    everything, _ = response_distributions(teacher, rollout, 1.0, None)
    tokens = torch.from_numpy(rollout.tokens[rollout.prompt_length :])
    values, ids = everything.topk(TOP_K)
    logprobs = everything.gather(1, tokens[:, None])[:, 0].float().numpy()
    return TeacherScores(logprobs, TeacherTop.of(ids.numpy(), values.float().numpy()))


Expected = dict[str, tuple[dict[str, Tensor], dict[str, float]]]
"""Form -> gradient of the second update; its loss and the teacher's metrics."""


def expected_of(root: Path, samples: list[Sample]) -> tuple[Expected, list[float]]:
    """(what every form gives, errors of the mistakes)."""
    model = load_reference(root / "student", torch.float64)
    with torch.no_grad():
        olds = {r.id: logprobs_of(model, r) for s in samples for r in s.rollout.sequences}

    def score_one(sample: Sample, r: Rollout) -> Scored:
        everything, _ = response_distributions(model, r, 1.0, rollout_routes(r))
        tokens = torch.from_numpy(r.tokens[r.prompt_length :])
        ids, top = top_of(r)
        return Scored(
            everything.gather(1, tokens[:, None])[:, 0],
            olds[r.id],
            torch.from_numpy(r.rollout_logprobs).double(),
            teacher_of(r),
            sample.advantage,
            sample.teacher_weight,
            sample.rollout.id,
            top,
            everything.gather(1, ids),
        )

    def scored() -> list[Scored]:
        return [score_one(sample, r) for sample in samples for r in sample.rollout.sequences]

    loss_of(scored()).backward()
    Adam(model, RECIPE).step()

    def gradient(at: str) -> tuple[dict[str, Tensor], float]:
        model.zero_grad()
        loss = loss_of(scored(), at=at)
        loss.backward()
        return saved(model, gradients=True), float(loss.detach())

    right: Expected = {}
    for form in FORMS:
        tensors, value = gradient(form)
        right[form] = tensors, {"train/loss": value, **metrics_of(scored(), form)}
    pairs = [("none", "token"), ("gradient", "token"), ("none", "reverse"), ("none", "forward")]
    pairs += [("truncated", "reverse"), ("forward", "reverse")]
    mistakes = [max(errors(gradient(at)[0], right[form][0]).values()) for at, form in pairs]
    return right, mistakes


def run_layouts(root: Path, samples: list[Sample]) -> dict[str, dict[str, float]]:
    """On a rank: layout and form -> metrics of the second update; gradients go to files.

    The first update is that of the token form.
    """
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
        for form in FORMS:
            k = 0 if form == "token" else TOP_K
            loss = engine.cfg.loss.model_copy(update={"teacher_form": form, "teacher_top_k": k})
            engine.cfg = engine.cfg.model_copy(update={"loss": loss})
            sums = MetricSums()
            engine.compute_gradient(batch, old, sums, replay="R3")
            save_gradients(engine, root / f"{layout}-{form}.gradient")
            values[f"{layout}-{form}"] = sums.reduce(dist.group.WORLD, place.device)
        place.destroy()
    dist.destroy_process_group()
    return values


@pytest.mark.timeout(600)
def test_value_and_gradient_are_those_of_the_formula(tmp_path: Path) -> None:
    family_checkpoint(tmp_path / "student", "qwen3_moe", num_hidden_layers=4)
    family_checkpoint(tmp_path / "teacher", "qwen3_moe", num_hidden_layers=4, seed=7)
    samples = teachers_samples(tmp_path)
    expected, mistakes = expected_of(tmp_path, samples)
    assert min(mistakes) > 100 * GRADIENT_LIMIT, f"the teacher's term hardly matters: {mistakes}"
    losses = run_ranks(run_layouts, 2, tmp_path, samples, timeout=500)
    failures = []
    for case in losses[0]:
        gradient, values = expected[case.rsplit("-", 1)[1]]
        off = errors(load_file(tmp_path / f"{case}.gradient"), gradient)
        worst = max(off, key=lambda name: off[name])
        found = losses[0][case]
        value_off = max(abs(found[name] / value - 1) for name, value in values.items())
        print(f"{case}: gradient off by {off[worst]:.2g} ({worst}), values by {value_off:.2g}")
        if off[worst] > GRADIENT_LIMIT:
            failures.append(f"{case}: {worst} is off by {off[worst]:.2g}")
        if value_off > VALUE_LIMIT:
            failures.append(f"{case}: {found} instead of {values}")
        assert ("teacher/divergence" in found) == (len(values) > 1), case
    assert len(losses[0]) == len(LAYOUTS) * len(FORMS)
    assert not failures, "\n".join(failures)
