"""Each rule on made-up curves: found when it should be, since the right step, and not on healthy
ones.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.renamed import new_metric
from megatron_rl.metrics.health import RECENT, RULES, WINDOW, examine
from megatron_rl.metrics.left_out import LEFT_OUT

ROOT = Path(__file__).parents[3]
CELLS = sorted((ROOT / "examples/paper_tiny/results/cells").glob("*.json"))
STEPS = 60
HEALTHY = {
    "train/nonfinite_frac": 0.0, "optim/skipped_updates": 0.0, "optim/empty_updates": 0.0,
    "first_order/total_p95": 0.02,
    "train/kl_mu_pi_k3": 6e-4, "logratio/f2_frac": 1e-4, "train/ess": 0.95,
    "train/tis_truncated_frac": 1e-3,
    "train/clip_low_frac": 0.03, "train/clip_high_frac": 0.01, "train/rejected_frac": 0.0,
    "optim/grad_norm": 3.0,
    "rollout/zero_advantage_groups_frac": 0.4, "rollout/truncated_frac": 0.01,
    "routing/replayed_mismatch": 0.0, "teacher/reverse_kl": 0.3,
    "replay/missing_rows_total": 0.0,
}  # fmt: skip


def curves(**changed):
    """A healthy run of STEPS steps with some noise: the reward rises, the entropy falls."""
    rng = np.random.default_rng(0)
    found = {
        name: value * (1 + 0.1 * rng.standard_normal(STEPS)) for name, value in HEALTHY.items()
    }
    found["rollout/server_restarts_total"] = np.zeros(STEPS)
    found["rollout/reward_mean"] = np.linspace(0.3, 0.9, STEPS) + 0.03 * rng.standard_normal(STEPS)
    found["train/entropy"] = 1.5 * np.exp(-np.arange(STEPS) / 25)  # as in the demo: 1.57 to 0.14
    return found | {
        name.replace("__", "/"): np.array(values, float) for name, values in changed.items()
    }


def findings(metrics, **settings):
    names = {name.replace("__", "."): value for name, value in settings.items()}
    found = examine(
        range(1, STEPS + 1), {name: values.tolist() for name, values in metrics.items()}, names
    )
    return [each for each in found if each.level != "ok"]


def after(step, before, later):
    return np.where(np.arange(1, STEPS + 1) >= step, later, before)


def test_nothing_is_found_in_a_healthy_run():
    assert findings(curves()) == []
    (ok,) = examine(
        range(1, STEPS + 1), {name: values.tolist() for name, values in curves().items()}
    )
    assert (
        ok.level == "ok"
        and ok.since_step is None
        and f"{len(RULES)} of {len(RULES)} rules" in ok.text
    )


@pytest.mark.parametrize(
    "name, before, later, level, lag",
    [
        ("train/nonfinite_frac", 0, 1e-6, "bad", 0), ("optim/skipped_updates", 0, 0.5, "bad", 0),
        ("first_order/total_p95", 0.02, 1.4, "watch", 2), ("first_order/total_p95", 0.02, 3.0,
        "bad", 2),
        ("train/kl_mu_pi_k3", 1e-3, 0.02, "watch", 2), ("train/kl_mu_pi_k3", 1e-3, 0.3, "bad", 2),
        ("logratio/f2_frac", 0, 0.05, "watch", 2), ("logratio/f2_frac", 0, 0.2, "bad", 2),
        ("train/ess", 0.9, 0.4, "watch", 2), ("train/ess", 0.9, 0.05, "bad", 2),
        ("train/tis_truncated_frac", 0, 0.05, "watch", 2), ("train/clip_low_frac", 0.02, 0.4,
        "watch", 2),
        ("train/clip_high_frac", 0.02, 0.4, "watch", 2), ("train/rejected_frac", 0, 0.8,
        "watch", 2),
        ("optim/grad_norm", 2, 90, "watch", 2), ("optim/empty_updates", 0, 1, "watch", 2),
        ("rollout/zero_advantage_groups_frac", 0.3, 0.99, "watch", 2),
        ("rollout/truncated_frac", 0, 0.8, "watch", 2),
        ("rollout/reward_mean", 0.8, 0.5, "watch", 2), ("rollout/reward_mean", 0.8, 0.1, "bad", 2),
        ("teacher/reverse_kl", 0.3, 0.9, "watch", 2),
        ("replay/missing_rows_total", 0, 4, "watch", 0), ("train/entropy", 0.5, 3.0, "bad", 2),
    ],
)  # fmt: skip
def test_each_rule_and_since_when(name, before, later, level, lag):
    """Medians of WINDOW steps see a change after WINDOW // 2 of them; what must never happen is
    seen at once.
    """
    (found,) = findings(curves() | {name: after(48, before, later)})
    assert (found.metric, found.level, found.since_step) == (name, level, 48 + lag)
    assert found.advice and found.title and "The rule: " in found.text


@pytest.mark.parametrize("first, last", [(-40.0, -5.0), (-5.0, -5.0), (-1.0, 0.03), (-1.0, 0.9)])
def test_rewards_below_0_are_no_fall(first, last):
    """Negative costs, and {-1, +1}: a share of a highest value near 0 or below it would lie above
    it.
    """
    noise = 0.01 * np.random.default_rng(0).standard_normal(STEPS)
    assert findings(curves(rollout__reward_mean=np.linspace(first, last, STEPS) + noise)) == []


def test_a_reward_of_minus_1_and_1_that_falls():
    (found,) = findings(curves(rollout__reward_mean=after(48, 0.8, -0.9)))
    assert (found.metric, found.level, found.since_step) == ("rollout/reward_mean", "bad", 50)


def test_entropy_that_falls_within_few_steps():
    (found,) = findings(curves(train__entropy=after(54, 1.2, 0.1)))
    assert found.title == "Entropy falls sharply" and found.level == "watch"


def test_one_odd_step_is_noise_but_a_skipped_update_is_not():
    spikes = {name: np.where(np.arange(STEPS) == STEPS - 3, 100.0, values) for name,
    values in curves().items()
              if name in ("first_order/total_p95", "optim/grad_norm",
              "train/kl_mu_pi_k3")}  # fmt: skip
    assert findings(curves() | spikes) == []
    assert findings(
        curves(optim__skipped_updates=np.where(np.arange(STEPS) == STEPS - 3, 1.0, 0.0))
    )


def test_what_is_long_past_is_not_said():
    past = np.where(np.arange(STEPS) == STEPS - RECENT - 1, 1.0, 0.0)
    assert findings(curves(optim__skipped_updates=past)) == []
    assert findings(curves(first_order__total_p95=np.where(np.arange(STEPS) < 30, 2.0, 0.01))) == []


def test_replay_that_does_not_replay_is_wrong_under_r3_alone():
    metrics = curves(routing__replayed_mismatch=after(50, 0, 0.01))
    assert findings(metrics) == [] and findings(metrics, replay__mode="R2") == []
    (found,) = findings(metrics, replay__mode="R3")
    assert found.level == "bad" and found.since_step == 50


@pytest.mark.parametrize("errors, level", [(1, "watch"), (8, "watch"), (9, "bad"), (800, "bad")])
def test_rewards_that_failed_are_wrong_above_a_hundredth_of_the_responses(errors, level):
    """40 responses in each step: 800 in the last RECENT."""
    counted = {
        "reward/errors_total": after(50, 3, 3 + errors),
        "reward/responses_total": 40.0 * np.arange(1, STEPS + 1),
    }
    (found,) = findings(curves() | counted)
    assert (found.level, found.since_step) == (
        level,
        50,
    ) and f"{errors} in the last 20 steps, {errors / 8:.2f}%" in found.text


def test_a_run_in_a_new_folder_does_not_count_what_the_run_before_it_counted():
    """It begins after another run's checkpoint, whose totals it continues."""
    counted = {"run/unwritten_files_total": [5.0, 5.0, 5.0]}
    assert examine([41, 42, 43], counted)[0].level == "ok"
    assert examine([1, 2, 3], counted)[0].level == "bad"
    assert (
        examine([41, 42, 43], {"run/unwritten_files_total": [float("nan"), float("nan"), 1.0]})[
            0
        ].since_step
        == 43
    )


@pytest.mark.parametrize("steps, level", [(1, "watch"), (10, "watch"), (11, "bad")])
def test_steps_that_taught_nothing_are_wrong_where_most_did_not(steps, level):
    flags = after(STEPS - steps + 1, 0, 1)
    (found,) = findings(curves(rollout__zero_advantages=flags))
    assert (found.level, found.since_step) == (
        level,
        STEPS - steps + 1,
    ) and f"In {steps} of the last 20" in found.text


def test_a_server_that_died_is_said_for_a_while():
    (found,) = findings(curves(rollout__server_restarts_total=after(58, 0, 1)))
    assert found.level == "watch" and found.since_step == 58
    assert findings(curves(rollout__server_restarts_total=after(20, 0, 1))) == []


def test_the_worst_comes_first():
    metrics = curves(
        train__rejected_frac=after(30, 0, 0.9), train__nonfinite_frac=after(59, 0, 0.1)
    )
    assert [found.level for found in findings(metrics)] == ["bad", "watch"]


@pytest.mark.parametrize("steps", range(WINDOW + 2))
def test_few_steps_and_steps_without_values(steps):
    (found,) = examine(
        range(1, steps + 1), {"train/ess": [0.9] * steps, "train/entropy": [float("nan")] * steps}
    )
    assert found.level == "ok" and (f"need {WINDOW} steps" in found.text) is (steps < WINDOW)
    assert examine([], {})[0].level == "ok"


def test_rules_name_metrics_and_guides_that_exist():
    page = (ROOT / "docs/reference/metrics.md").read_text()
    for rule in (*RULES, *LEFT_OUT):
        assert f"`{rule.metric}`" in page, rule.metric
        path, _, anchor = rule.guide.partition("#")
        headings = [
            line.lstrip("# ")
            for line in (ROOT / path).read_text().splitlines()
            if line.startswith("#")
        ]
        anchors = {
            "".join(c for c in h.lower().replace(" ", "-") if c.isalnum() or c in "-_")
            for h in headings
        }
        assert anchor in {each.strip("-") for each in anchors}, rule.guide


def test_the_stored_runs_of_the_papers_experiments():
    """84 real runs of examples/paper_tiny: that example's own rule finds the collapsed ones from
    the reward.

    (collapsed, found here) -> runs.  Of the 12 that sampled ahead with staleness, 4 are found that
    did not collapse.
    """
    from examples.experiments.analyse import Run
    from examples.paper_tiny.cells import EXPERIMENT

    found = {"paper": Counter(), "staleness": Counter()}
    for cell in CELLS:
        data = json.loads(cell.read_text())
        columns = {
            new_metric(name): [float("nan") if value is None else value for value in values]
            for name, values in data["columns"].items()
        }
        steps = range(1, len(columns["train/entropy"]) + 1)
        collapsed = Run(data, EXPERIMENT.tables[data["table"]]).collapse_step is not None
        kind = "staleness" if data["table"] == "staleness" else "paper"
        found[kind][collapsed, any(each.level != "ok" for each in examine(steps, columns))] += 1
    assert found["paper"] == {
        (True, True): 13,
        (True, False): 5,
        (False, True): 1,
        (False, False): 53,
    }
    assert found["staleness"] == {(False, True): 4, (False, False): 8}


def test_the_window_of_a_short_run_is_the_run():
    (found, *_) = examine(list(range(1, 11)), {"rollout/zero_advantages": [1.0] * 10})
    assert found.level == "bad" and "In 10 of the last 10 steps" in found.text
