"""explain-mismatch without a server: evidence, rules, changes of tensors, histories, the page, bad
input.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from megatron_rl.models.spec import RouterKind
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl_tools.explain_mismatch import evidence as ev
from megatron_rl_tools.explain_mismatch import history, trainer_side, weights
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.explain_mismatch import main
from megatron_rl_tools.explain_mismatch.ladder import Explanation, Rung, shifted_back
from megatron_rl_tools.explain_mismatch.mismatch_page import write_page
from megatron_rl_tools.explain_mismatch.server_evidence import fresh_evidence
from megatron_rl_tools.explain_mismatch.server_side import Fresh
from megatron_rl_tools.explain_mismatch.trainer_side import Half
from megatron_rl_tools.explain_mismatch.verdicts import (
    PROOF,
    RULES,
    TRIAL,
    fill_text,
    holds,
    verdicts_of,
)
from tests.former_layout import to_former_layout

LAYERS, EXPERTS, TOP_K = 3, 8, 2
HEALTHY = {
    "diff.live": 1e-6,
    "diff.replay": 1e-6,
    "diff.worst": 1e-6,
    "limit.diff": 1e-4,
    "limit.exact": 1e-5,
    "kl.live": 1e-12,
    "kl.replay": 1e-12,
}
DIFFERENT = HEALTHY | {
    "diff.live": 0.1,
    "diff.replay": 0.1,
    "diff.worst": 0.1,
    "diff.base": 0.1,
    "kl.live": 0.02,
    "kl.replay": 0.02,
}


def sequences(count: int = 4, rows: int = 20) -> tuple[list[Rollout], list[Half]]:
    """The server's and the trainer's half, equal."""
    rng = np.random.default_rng(0)
    rollouts, halves = [], []
    for number in range(count):
        routes = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows * LAYERS)]).reshape(
            rows, LAYERS, TOP_K
        )
        logprobs = -rng.exponential(size=rows - 4).astype(np.float32)
        rollout = Rollout(
            id=f"q/{number}", tokens=rng.integers(0, 50, rows + 1), prompt_length=5,
            rollout_logprobs=logprobs,
            routed_experts=routes.astype(np.uint8), finish_reason="length",
            policy_versions=np.zeros(rows - 4, np.int32),
        )  # fmt: skip
        rollouts.append(rollout)
        halves.append(
            Half(
                logprobs,
                routes,
                np.zeros((rows, LAYERS), np.float32),
                np.ones((rows, LAYERS), np.float32),
            )
        )
    return rollouts, halves


def with_routes(rollouts: list[Rollout], edit) -> list[Rollout]:
    return [
        replace(each, routed_experts=edit(each.routed_experts), routes_digest=None)
        for each in rollouts
    ]


# Evidence


def test_kl_is_k3_of_the_ratio():
    mu, pi = [np.log(np.array([0.5, 0.25]))], [np.log(np.array([0.25, 0.5]))]
    assert ev.kl(mu, pi) == pytest.approx(((0.5 - 1 - np.log(0.5)) + (2 - 1 - np.log(2))) / 2)
    assert ev.kl(mu, mu) == 0
    assert ev.difference(mu, pi) == pytest.approx(np.log(2))


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_shift_of_rows_is_found_with_its_sign(shift):
    rollouts, halves = sequences()
    moved = with_routes(rollouts, lambda ids: np.roll(ids, shift, axis=0))
    found = ev.route_evidence(moved, halves)
    assert (
        found["routes.row_shift"] == shift == -found["routes.row_offset"]
        and found["routes.layer_shift"] == 0
    )
    assert found["routes.row_shift_overlap"] == 1 and found["routes.overlap"] < 0.6
    assert (
        shifted_back(moved[0].routed_experts, shift, 0)[2:-2] == rollouts[0].routed_experts[2:-2]
    ).all()


def test_a_shift_of_layers_is_found():
    rollouts, halves = sequences()
    moved = with_routes(rollouts, lambda ids: np.roll(ids, 1, axis=1))
    assert ev.route_evidence(moved, halves)["routes.layer_shift"] == 1
    assert (shifted_back(moved[0].routed_experts, 0, 1) == rollouts[0].routed_experts).all()


def test_routes_of_another_response_are_found():
    rollouts, halves = sequences()
    swapped = with_routes(rollouts, lambda ids: ids)
    swapped[0], swapped[1] = (replace(a, routed_experts=b.routed_experts, routes_digest=None)
                              for a, b in ((rollouts[0], rollouts[1]), (rollouts[1],
                              rollouts[0])))  # fmt: skip
    found = ev.route_evidence(swapped, halves)
    assert found["routes.foreign"] == 0.5 and found["routes.row_shift"] == 0


def test_equal_halves_show_no_shift():
    rollouts, halves = sequences()
    found = ev.route_evidence(rollouts, halves) | ev.logprob_evidence(rollouts, halves)
    assert found["routes.overlap"] == 1
    assert not any(
        found[name]
        for name in ("routes.row_shift", "routes.layer_shift", "routes.foreign", "logprobs.shift")
    )


def test_a_shift_of_logprobs_is_found():
    rollouts, halves = sequences()
    moved = [replace(each, rollout_logprobs=np.roll(each.rollout_logprobs, 1)) for each in rollouts]
    assert ev.logprob_evidence(moved, halves)["logprobs.shift"] == 1


def test_the_first_layer_is_the_first_with_a_clear_flip():
    rollouts, halves = sequences()
    other = (halves[0].routes + 1) % EXPERTS
    routes, gap = halves[0].routes.copy(), np.zeros((20, LAYERS), np.float32)
    routes[3, 0], gap[3, 0] = other[3, 0], 0.01  # close: rounding
    routes[5, 1], gap[5, 1] = other[5, 1], 0.7
    found, table = ev.flip_evidence(
        rollouts, [replace(halves[0], routes=routes, gap=gap), *halves[1:]], num_layers=LAYERS
    )
    assert found["flips.first_layer"] == 1 and found["flips.first_gap"] == pytest.approx(0.7)
    assert [row["flips"] for row in table] == [1 / 80, 1 / 80, 0] and [
        row["clear"] for row in table
    ] == [0, 1 / 80, 0]


# Rules


def test_a_healthy_pair_is_not_accused():
    assert verdicts_of(Evidence(HEALTHY)) == []


def test_what_nothing_explains_is_said():
    assert [each.name for each in verdicts_of(Evidence(DIFFERENT))] == ["unexplained"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_can_speak(rule):
    """Evidence made of its conditions alone makes it hold; its texts need no name that a typing
    error made up.
    """
    values = dict(DIFFERENT)
    for condition in rule.when:
        name, sign, *right = condition.split()
        if not right[-1][0].isdigit():
            values.setdefault(right[-1], 1.0)
        factor = float(right[0]) if len(right) == 3 else 1.0
        limit = factor * (values[right[-1]] if right[-1] in values else float(right[-1]))
        values[name] = {
            "<": limit / 2,
            "<=": limit,
            ">": limit * 2 + 1,
            ">=": limit,
            "==": limit,
            "!=": limit + 1,
        }[sign]
    assert all(holds(each, Evidence(values)) for each in rule.when)
    found = [each for each in verdicts_of(Evidence(values)) if each.name == rule.name]
    assert found or rule.level != PROOF
    named = re.findall(r"\{([\w./]+)", rule.text + rule.key + rule.value)
    sources = " ".join(
        path.read_text()
        for path in Path(ev.__file__).parent.glob("*.py")
        if path.name != "verdicts.py"
    )
    for name in [
        *named,
        *(
            part
            for each in rule.when
            for part in each.split()
            if "." in part and not part[0].isdigit()
        ),
    ]:
        last = name.partition(".")[2] if not name.startswith("trial.") else name.split(".")[1]
        assert re.search(rf"\b{last}=|\b{last}\b", sources), name


def test_a_proof_comes_before_a_trial_and_shares_are_what_goes_away():
    found = Evidence(DIFFERENT | {
        "trial.rope_theta.diff": 1e-6, "trial.rope_theta.value": 1e4, "trial.rope_theta.kl": 0.005,
        "model.rope_theta": 1e6,
    })  # fmt: skip
    (verdict,) = verdicts_of(found)
    assert (
        verdict.name == "rope_theta"
        and verdict.share == pytest.approx(0.75)
        and "10000" in verdict.cause
    )
    found |= {
        "config.differ": 1.0,
        "config.text": "rope_theta = 1 on the server",
        "config.first": "rope_theta",
        "kl.their_config": 0.0,
    }
    (verdict,) = verdicts_of(found)
    assert (verdict.name, verdict.share, verdict.key) == ("config_differs", 1.0, "rope_theta")


def test_conditions():
    found = Evidence({"a.b": 2.0, "c": 1.0, "text": "x"})
    assert (
        holds("a.b > c", found)
        and holds("a.b <= 2 * c", found)
        and not holds("a.b < 1.5 * c", found)
    )
    assert (
        not holds("missing > 0", found)
        and not holds("a.b > missing", found)
        and not holds("text > 0", found)
    )
    assert fill_text("{a.b:.1f} {text} {missing:.2e}", found) == "2.0 x not measured"


def test_levels_are_in_use():
    assert {rule.level for rule in RULES} == {1, 2, 3} and any(
        rule.level == TRIAL for rule in RULES
    )
    assert len({rule.name for rule in RULES}) == len(RULES)


# Weights


def swap(parts: list[torch.Tensor], *places: int) -> list[torch.Tensor]:
    order = list(range(len(parts)))
    for a, b in zip(places[::2], places[1::2], strict=True):
        order[a], order[b] = b, a
    return [parts[number] for number in order]


CHANGED = {
    "rounded to bfloat16": lambda parts: [part.bfloat16() for part in parts],
    "zeros": lambda parts: [torch.zeros_like(part) for part in parts],
    "transposed": lambda parts: [part.T for part in parts],
    "experts 1 and 3 swapped": lambda parts: swap(parts, 2, 6, 3, 7),
    "gate and up swapped": lambda parts: swap(parts, 0, 1, 2, 3, 4, 5, 6, 7),
    "experts rolled by one": lambda parts: [*parts[2:], *parts[:2]],
    "rounded to fp8 in blocks": lambda parts: [weights.fp8(part) for part in parts],
    "expert 2 rounded to fp8 in blocks": lambda parts: [
        *parts[:4],
        weights.fp8(parts[4]),
        weights.fp8(parts[5]),
        *parts[6:],
    ],
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_known_change_is_proven_by_its_checksum(change):
    generator = torch.Generator().manual_seed(0)
    prefix, served = "model.layers.0.mlp.experts", "model.layers.0.mlp.experts.w13_weight"
    tensors = {
        f"{prefix}.{expert}.{part}_proj.weight": torch.randn(32, 32, generator=generator)
        for expert in range(4) for part in ("gate", "up")
    }  # fmt: skip
    ours = weights.digests_of_model(tensors, torch.float32)
    found = ours.digests()
    parts = [tensors[name] for name in ours.parts[served]]
    theirs = {served: weights.digest_of_tensor(served, CHANGED[change](parts), torch.float32)}
    assert weights.digest_of_tensor(served, parts, torch.float32) == found[served]
    changes, replaced = weights.explain_weights(
        [served], theirs, ours, found, tensors, torch.float32
    )
    assert changes == {served: change}
    assert (
        weights.digest_of_tensor(
            served, [replaced[name] for name in ours.parts[served]], torch.float32
        )
        == theirs[served]
    )
    assert weights.explain_weights(
        [served], {served: "0" * 16}, ours, found, tensors, torch.float32
    ) == ({}, {})


def test_a_tensor_in_another_place_is_named():
    tensors = {"lm_head.weight": torch.ones(64, 4), "model.embed_tokens.weight": torch.zeros(64, 4)}
    ours = weights.digests_of_model(tensors, torch.float32)
    found = ours.digests()
    theirs = {"lm_head.weight": found["model.embed_tokens.weight"]}
    changes, replaced = weights.explain_weights(
        ["lm_head.weight"], theirs, ours, found, tensors, torch.float32
    )
    assert (
        changes == {"lm_head.weight": "holds model.embed_tokens.weight"}
        and not replaced["lm_head.weight"].any()
    )


# A trained run


def make_run(folder: Path, differences: list[float], **metrics: list[float]) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text('[model]\npath = "/nowhere"\n[data]\ntrain = "unused"\n')
    with open(folder / "metrics.jsonl", "w") as file:
        for step, value in enumerate(differences, start=1):
            row = {
                "step": step,
                "policy_version": step,
                "time/weight_sync": 0.1,
                history.DIFFERENCE: value,
            }
            row |= {name.replace("__", "/"): values[step - 1] for name, values in metrics.items()}
            file.write(json.dumps(row | {"per_layer": {"routing/flip_rate": [0.1, value]}}) + "\n")
    return folder


def test_the_first_step_that_differs_for_good_is_the_beginning():
    noise = [1.0, 1.1, 0.9, 1.0, 5.0, 1.0, 1.05]  # one outlier is none
    assert history.since_when(np.array(noise)) is None
    assert history.since_when(np.array([*noise, 4.0, 5.0, 6.0, 6.0])) == 7
    assert history.since_when(np.array([1.0])) is None


def test_a_run_says_when_and_what(tmp_path):
    differences = [1e-4] * 6 + [5e-2] * 4
    run = make_run(
        tmp_path / "run", differences, routing__router_mismatch=[0.001] * 6 + [0.2] * 4,
        routing__flipped_margin=[0.01] * 6 + [0.5] * 4,
        routing__kept_margin=[0.6] * 10,
    )  # fmt: skip
    (run / "events.jsonl").write_text(
        json.dumps({"step": 7, "kind": "server_restart", "text": "server <b>1</b>"}) + "\ncut"
    )
    found = history.read_history(run)
    assert found.began == 7 and [each.name for each in found.verdicts] == ["clear_flips"]
    assert found.events == ("step 7, server_restart: server <b>1</b>",)
    page = write_page(tmp_path / "page.html", None, found, title="<script>run</script>").read_text()
    assert (
        "<script>" not in page
        and "server &lt;b&gt;1" in page
        and "data:image/png;base64," in page
        and "Step <b>7</b>" in page
    )


def test_a_quiet_run_has_no_beginning(tmp_path):
    found = history.read_history(make_run(tmp_path / "run", [1e-4, 1.2e-4, 0.9e-4, 1e-4]))
    assert (
        found.began is None and not found.verdicts and "did not begin" in "\n".join(found.lines())
    )


def test_a_step_without_a_counted_token_is_no_beginning(tmp_path):
    nothing = math.nan
    found = history.read_history(make_run(tmp_path / "quiet", [0.01, nothing, *[0.01] * 8]))
    assert found.began is None and len(found.steps) == 9
    mismatch = [0.001, nothing, *[0.001] * 4, *[0.2] * 4]
    run = make_run(
        tmp_path / "run",
        [1e-4, nothing, *[1e-4] * 4, *[5e-2] * 4],
        routing__router_mismatch=mismatch,
    )
    found = history.read_history(run)
    assert found.began == 7 and found.evidence["before.routing/router_mismatch"] == 0.001


def test_shifted_routes_show_in_both_saved_halves(tmp_path):
    run = make_run(tmp_path / "run", [1e-4] * 3 + [5e-2] * 3)
    rollouts, halves = sequences()
    moved = with_routes(rollouts, lambda ids: np.ascontiguousarray(np.roll(ids, 1, axis=0)))
    Recorder(run, save_tensors=True).record(
        4, [RolloutGroup(Prompt("q", "", (1,), ""), tuple(moved))]
    )
    tensors = {}
    for rollout, half in zip(rollouts, halves, strict=True):
        tensors |= {
            f"{rollout.id}:old_logprobs": half.logprobs,
            f"{rollout.id}:own_experts": half.routes.astype(np.uint8),
        }
    (run / "trained").mkdir()
    save_file(tensors, run / "trained/step_000004.safetensors", metadata={"schema": "1"})
    lines = [
        {
            "schema": 1,
            "step": 4,
            "id": each.id,
            "sampled_by": "rollouts",
            "tensors": "trained/step_000004.safetensors",
        }
        for each in rollouts
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "cut"
    (run / "trained/step_000004.jsonl").write_text(text)
    found = history.read_history(run)
    assert found.began == 4 and [each.name for each in found.verdicts] == ["routes_shifted"]
    assert found.notes == ("step 4: 4 sequences with the halves of both engines",)
    to_former_layout(run)
    again = history.read_history(run)
    assert (again.verdicts, again.notes) == (found.verdicts, found.notes)


# The page and the command


def test_the_page_shows_a_verdict_and_escapes(tmp_path):
    found = Evidence(DIFFERENT | {"server.unusual": "<i>quantization</i>"})
    rungs = (Rung("as they are", "<u>", 0.02, 0.1, 0.0), Rung("same routes", "", 0.01, 0.05, 0.5))
    layers = ({"layer": 0, "flips": 0.1, "clear": 0.05, "gap": 1.0, "margin": 0.5},)
    explanation = Explanation(
        found, tuple(verdicts_of(found)), rungs, layers, np.arange(5), np.full(5, 0.1)
    )
    page = write_page(tmp_path / "page.html", explanation, None, title="x").read_text()
    assert (
        "unexplained" in page
        and "<i>" not in page
        and "<u>" not in page
        and page.count("data:image/png") == 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs RUN_DIR, or --url and --model"),
        (["--url", "http://127.0.0.1:9"], "needs RUN_DIR, or --url and --model"),
        (
            ["--url", "http://127.0.0.1:9", "--model", "/nowhere"],
            "--model /nowhere: no config.json",
        ),
        (["/nowhere"], "/nowhere: no metrics.jsonl"),
        (["/nowhere", "--url", "http://x"], "/nowhere: no effect of --url with RUN_DIR"),
        (["/nowhere", "--config", "x.toml", "--seed", "0"], "no effect of --config, --seed with"),
        (["/nowhere", "--prompts", "6", "--no-routes"], "no effect of --prompts, --no-routes with"),
        (["/nowhere", "--longest", "9", "--response", "9"], "of --longest, --response with"),
    ],
)
def test_bad_input_names_the_option_and_what_to_do(options, message, capsys):
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("side", ["trainer", "server"])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_logprob_that_is_not_finite_is_a_proof_against_its_side(side, all_of_them, tmp_path):
    rollouts, halves = sequences(2)
    broken = rollouts[0].rollout_logprobs.copy()
    broken[: None if all_of_them else 1] = math.nan
    if side == "trainer":
        halves = [replace(half, logprobs=broken) for half in halves]
    else:
        rollouts = [replace(each, rollout_logprobs=broken) for each in rollouts]
    mu, pi = [r.rollout_logprobs for r in rollouts], [half.logprobs for half in halves]
    evidence = Evidence(HEALTHY) | ev.logprob_evidence(rollouts, halves)
    evidence = Evidence(evidence | ev.position_evidence(rollouts, halves, [4]))
    evidence |= {"diff.live": ev.difference(mu, pi), "kl.live": ev.kl(mu, pi)}
    assert math.isnan(evidence["kl.live"]) == all_of_them == math.isnan(evidence["diff.live"])
    verdicts = verdicts_of(evidence)
    assert f"{side}_not_finite" in [each.name for each in verdicts]
    rungs = (Rung("as they are", "", evidence["kl.live"], evidence["diff.live"], 0.0),)
    sizes = np.abs(np.concatenate(mu) - np.concatenate(pi))
    explanation = Explanation(evidence, tuple(verdicts), rungs, (), np.arange(len(sizes)), sizes)
    assert "not finite" in write_page(tmp_path / "x.html", explanation, None, title="x").read_text()


def without_some_routes(rollouts: list[Rollout], halves: list[Half]) -> list[Rollout]:
    """Rows 3 and 4 of every sequence have no route; their ids agree with nothing."""
    missing = np.zeros(20, bool)
    missing[3:5] = True
    return [
        replace(
            each,
            routed_experts=np.where(
                missing[:, None, None], (half.routes + 1) % EXPERTS, each.routed_experts
            ).astype(np.uint8),
            missing_routes=missing,
            routes_digest=None,
        )
        for each, half in zip(rollouts, halves, strict=True)
    ]


def test_rows_without_a_route_are_no_flips():
    rollouts, halves = sequences()
    partial = without_some_routes(rollouts, halves)
    gapped = [replace(half, gap=np.full_like(half.gap, 0.7)) for half in halves]
    found, table = ev.flip_evidence(partial, gapped, num_layers=LAYERS)
    assert found["flips.share"] == found["flips.clear"] == 0 and len(table) == LAYERS
    assert ev.route_evidence(partial, halves)["routes.overlap"] == 1
    nothing = [replace(each, missing_routes=np.ones(20, bool)) for each in rollouts]
    assert ev.route_evidence(nothing, halves) == {}
    assert ev.flip_evidence(nothing, halves, num_layers=LAYERS) == ({}, [])


def test_rows_without_a_route_are_no_stale_cache():
    """Neither of the sampling nor of the forward without the cache; a real difference is seen."""
    rollouts, halves = sequences()
    flags = np.arange(20) < 2
    blank = np.where(flags[:, None, None], np.zeros((1, 1, TOP_K), int), halves[0].routes)
    lost = replace(rollouts[0], missing_routes=flags, routed_experts=blank.astype(np.uint8),
                   routes_digest=None)  # fmt: skip
    none = replace(rollouts[1], routed_experts=None, routes_digest=None)
    others = [Fresh(half.logprobs, half.routes, None, None) for half in halves[1:]]
    whole = Fresh(halves[0].logprobs, halves[0].routes, None, None)
    partial = replace(whole, routes=blank, missing_routes=flags)

    def differ(rollouts, fresh):
        live = halves[: len(fresh)]
        evidence = fresh_evidence(rollouts, fresh, live, temperature=1.0, server_dtype="float32")
        return evidence.number("cache.differ")

    for sampled, forward in ((lost, whole), (rollouts[0], partial), (lost, partial)):
        assert differ([sampled, none, *rollouts[2:]], [forward, *others]) == 0
    nothing = replace(whole, missing_routes=np.ones(20, bool))
    assert differ([rollouts[0], none], [nothing, others[0]]) is None
    stale = replace(whole, routes=(halves[0].routes + 1) % EXPERTS)
    assert differ([lost, *rollouts[1:]], [stale, *others]) > 0.1


def test_flags_of_rows_without_a_route_move_as_the_rows():
    rollouts, halves = sequences()
    partial = without_some_routes(rollouts, halves)
    ids = [shifted_back(each.routed_experts, 1, 0) for each in partial]
    moved = trainer_side.with_routes(partial, ids, lambda flags: shifted_back(flags, 1, 0))
    assert all(np.flatnonzero(each.missing_routes).tolist() == [2, 3] for each in moved)


def test_the_trainer_measures_no_gap_in_rows_without_a_route():
    rollouts, halves = sequences(1)
    (partial,) = without_some_routes(rollouts, halves)
    scores = object.__new__(trainer_side.RouterScores)
    scores.kind, scores.top_k, scores.biases = RouterKind(), TOP_K, [None] * LAYERS
    logits = torch.zeros(LAYERS, 20, EXPERTS)
    ids = torch.from_numpy(halves[0].routes).transpose(0, 1)
    scores.calls = [[part] for part in logits.scatter(2, ids, 2.0)]
    for rollout, expected in ((partial, False), (replace(partial, missing_routes=None), True)):
        _, gap, _ = scores.of(0, slice(0, 20), rollout)
        assert gap.any() == expected
