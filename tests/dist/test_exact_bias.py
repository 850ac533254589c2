"""The enumeration of all responses finds no bias (float64) where theory says that there is none,
and it finds one where the correction is left out.  The engine's own gradient of the enumerated
mini-batch, on one rank and on two, is the expected gradient.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.exact_bias.estimators import (
    GROUP,
    advantages,
    first_order_gradient,
    moments,
    token_coefficients,
    true_gradient,
    with_coefficients,
)
from benchmarks.exact_bias.policy import SIZES, Policy, make_sample, one_rank, places
from benchmarks.exact_bias.responses import PROMPTS, Responses, all_responses
from benchmarks.exact_bias.study import GROUPS, Study, group_biases
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.loss import PRESETS, LossConfig
from megatron_rl.metrics.reduce import MetricSums
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

pytestmark = pytest.mark.slow
EXACT = 1e-12
UPDATES = 2
# on policy every weight is 1 and nothing is clipped: A log pi, summed without lengths
UNBIASED = sorted(
    name
    for name, spec in PRESETS.items()
    if spec.aggregation in ("sequence_sum", "token_mean")
    and spec.advantage not in ("std", "batch_whitened")
)
RATIO = LossConfig(name="reinforce", weight="total", weight_level="product")


def error(estimate, expected):
    return float((estimate - expected).norm() / expected.norm())


def enumerate_all(folder):
    """On a rank: name -> relative error of an expected gradient."""
    with one_rank(Path(folder)) as policy:
        study = Study(policy, policy.random_weights(0), 0)
        fp8 = study.samplers["fp8"].routes
        policy.weights = study.weights
        fresh = {"none": policy.steps(None), "R2": policy.steps(study.old.routes)}
        fresh["R3"] = policy.steps(fp8)
        weights = study.updated(study.weights, UPDATES)
        policy.weights = weights
        stale = {"none": policy.steps(None), "R3": policy.steps(fp8)}
        errors = {
            **on_policy(study, fresh["none"]),
            **off_policy(study, fresh, 0),
            **off_policy(study, stale, UPDATES),
            **equal_gradients(study, stale["R3"]),
            **{f"std, G = {g}": e for g, e in zip(GROUPS, group_biases(study), strict=True)},
        }
        policy.weights = weights  # group_biases sets those of pi_old
        save(Path(folder) / "expected.pt", study, weights, stale["R3"])
    return errors


def on_policy(study, pi):
    situation = study.situation("exact", "none", pi)
    true = true_gradient(study.responses, study.rewards, pi)
    gram = pi.gradient @ pi.gradient.T
    errors = {}
    for name in [*UNBIASED, "grpo"]:
        # E[A] of a group is (1 - 1/G) (R - E R), of leave-one-out exactly R - E R
        kind = PRESETS[name].advantage
        scale = 1 - 1 / GROUP if kind == "mean" else 1.0
        mean = moments(situation, LossConfig(name=name), gram).mean
        errors[f"on policy, {name}"] = error(mean / scale, true)
    chances = situation.responses.log_probabilities(pi.logprobs).exp()
    score = with_coefficients(study.responses, study.responses.per_token(chances), pi)
    errors["E grad log pi"] = float(score.norm() / true.norm())
    return errors


def off_policy(study, steps, updates):
    """Errors of the ratios for every sampler and replay, against the true gradient with live
    routing (true), with the replayed routes (replayed), and against J_token (first order).
    """
    errors, scale = {}, 1 - 1 / GROUP
    live = true_gradient(study.responses, study.rewards, steps["none"])
    for replay, pi in steps.items():
        gram = pi.gradient @ pi.gradient.T
        with_routes = true_gradient(study.responses, study.rewards, pi)
        for sampler in ("fp8",) if replay == "R3" else study.samplers:
            situation = study.situation(sampler, replay, pi)
            means = {
                "sequence": moments(situation, RATIO, gram).mean / scale,
                "token": moments(situation, LossConfig(name="reinforce", weight="total"), gram).mean
                / scale,
                "no ratio": moments(situation, LossConfig(name="reinforce"), gram).mean / scale,
            }
            first = first_order_gradient(situation)
            for ratio, mean in means.items():
                key = f"{sampler}, {replay}, {updates}, {ratio}"
                errors[f"{key}, true"] = error(mean, live)
                errors[f"{key}, replayed"] = error(mean, with_routes)
                errors[f"{key}, first order"] = error(mean, first)
    return errors


def equal_gradients(study, pi):
    """Two losses that are equal by algebra, and the variance by all gradients one by one."""
    situation = study.situation("fp8", "R3", pi)
    gram = pi.gradient @ pi.gradient.T
    decoupled = moments(situation, LossConfig(name="decoupled_ppo"), gram)
    minirl = LossConfig(name="minirl", weight_mode="none", clip_low=0.2, clip_high=0.2)
    config, responses = LossConfig(name="minirl"), situation.responses
    mean, square = advantages(situation, "mean")
    tokens = token_coefficients(situation, config, mean)
    alone = torch.zeros(len(mean), pi.gradient.shape[1], dtype=torch.float64)
    alone.index_add_(0, responses.sequences.ids, tokens[:, None] * pi.gradient[responses.steps])
    chances = situation.probabilities / len(PROMPTS)
    second = (chances * square / mean.square() * alone.square().sum(1)).sum()
    variance = second - (chances[:, None] * alone).sum(0).square().sum()
    return {
        "minirl as decoupled_ppo": error(moments(situation, minirl, gram).mean, decoupled.mean),
        "variance": abs(moments(situation, config, gram).variance / float(variance) - 1),
    }


def save(path, study, weights, pi):
    """Inputs of the engine's gradient, and the expected gradient of MiniRL."""
    situation = study.situation("fp8", "R3", pi)
    torch.save(
        {
            "old": study.weights,
            "weights": weights,
            "routes": study.samplers["fp8"].routes,
            "mu": situation.mu,
            "advantages": advantages(situation, "mean")[0] * situation.probabilities,
            "gradient": moments(
                situation, LossConfig(name="minirl"), pi.gradient @ pi.gradient.T
            ).mean,
        },
        path,
    )


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact_bias")
    (errors,) = run_ranks(enumerate_all, 1, str(folder))
    return folder, errors


@pytest.mark.parametrize("name", UNBIASED)
def test_on_policy_these_presets_have_no_bias(exact, name):
    assert exact[1][f"on policy, {name}"] < EXACT


def test_lengths_and_deviations_have_a_bias_on_policy(exact):
    assert exact[1]["E grad log pi"] < EXACT
    assert exact[1]["on policy, grpo"] > 0.05
    # with two responses |A| is 1 where the rewards differ: no prompt has another weight
    assert exact[1]["std, G = 2"] < EXACT < 1e-3 < exact[1]["std, G = 8"] < exact[1]["std, G = 64"]


@pytest.mark.parametrize("updates", [0, UPDATES])
@pytest.mark.parametrize("sampler", ["exact", "fp32", "bf16", "fp8"])
def test_the_ratio_of_the_response_has_no_bias_for_any_sampler_and_age(exact, sampler, updates):
    errors = {ratio: exact[1][f"{sampler}, none, {updates}, {ratio}, true"] for ratio in
              ("sequence", "token", "no ratio")}  # fmt: skip
    assert errors["sequence"] < EXACT
    if updates or sampler == "fp8":  # the correction is needed, and that of a token is not enough
        assert errors["no ratio"] > errors["token"] > 1e-3


@pytest.mark.parametrize("updates", [0, UPDATES])
@pytest.mark.parametrize("replay", ["none", "R3"])
def test_token_ratios_have_the_gradient_of_the_first_order_surrogate(exact, replay, updates):
    key = f"fp8, {replay}, {updates}"
    assert exact[1][f"{key}, token, first order"] < EXACT
    assert exact[1][f"{key}, no ratio, first order"] > 1e-3


def test_r2_leaves_the_first_update_alone_and_r3_changes_its_target(exact):
    assert exact[1]["fp8, R2, 0, sequence, true"] < EXACT
    for updates in (0, UPDATES):
        # unbiased for the policy with the sampler's routes, which is another one
        assert exact[1][f"fp8, R3, {updates}, sequence, replayed"] < EXACT
        assert exact[1][f"fp8, R3, {updates}, sequence, true"] > 1e-2


def test_equal_losses_and_the_variance(exact):
    assert exact[1]["minirl as decoupled_ppo"] < EXACT
    assert exact[1]["variance"] < 1e-10


# The engine's own gradient ------------------------------------------------------------------------


def engine_error(folder):
    """On a rank: the error of the float32 engine's gradient of a mini-batch of all responses, whose
    advantages carry mu(y).
    """
    import torch.distributed as dist

    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    folder = Path(folder)
    data = torch.load(folder / "expected.pt", weights_only=False)
    engine = make_engine(
        folder / "fp32", model={"router_dtype": "fp64"}, optim={"clip_grad": 1e9}, measure=False,
        loss={"name": "minirl"},
    )  # fmt: skip
    policy = Policy(engine, torch.float32)
    parallel = engine.parallel
    batch = make_mini_batch(
        response_samples(data)[parallel.dp_rank :: parallel.dp_size],
        max_tokens=500,
        rule=engine.pack_rule,
        dp_group=parallel.dp_group,
    )
    policy.weights = data["old"]
    old = engine.old_logprobs(batch, MetricSums(), replay="R3")
    policy.weights = data["weights"]
    engine.compute_gradient(batch, old, MetricSums(), replay="R3")
    parameters = dict(engine.chunks[0].named_parameters())
    gradient = torch.cat([parameters[name].main_grad.flatten() for name in policy.names])
    parallel.destroy()
    dist.destroy_process_group()
    # the engine descends
    return error(-gradient.double(), data["gradient"])


def response_samples(data):
    responses, first = Responses.make(), places()
    logprobs = data["mu"].flatten()[responses.steps]
    parts = logprobs.split(responses.lengths.tolist())
    samples = []
    for number, (prompt, ids) in enumerate(all_responses()):
        carrier, _ = first[prompt, ids[:-1]]
        rows = len(PROMPTS[prompt]) + len(ids) - 1
        samples.append(
            make_sample(
                f"r{number}",
                prompt,
                ids,
                logprobs=parts[number].tolist(),
                routes=data["routes"][carrier][:rows],
            )
        )
    # the engine divides by the number of responses, the expectation by that of the prompts
    scale = len(samples) / len(PROMPTS)
    values = (scale * data["advantages"]).tolist()
    return [replace(s, advantage=value) for s, value in zip(samples, values, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_has_the_expected_gradient(exact, ranks):
    folder, _ = exact
    if not (folder / "fp32").exists():
        random_checkpoint(folder / "fp32", **SIZES)
    errors = run_ranks(engine_error, ranks, str(folder))
    assert max(errors) < 1e-4, errors
