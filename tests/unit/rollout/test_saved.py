"""Saved rollouts come back as the records that were written, for any number of replicas, or are
refused with rule and fix.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.config import dump_config, load_config
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl.rollout.unique_ids import with_unique_ids
from tests.former_layout import to_former_layout

SPEC = ModelSizes(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8, vocab_size=64)
P, G = 4, 2


def config(tmp_path, name="train", **sections):
    base = {
        "run": {
            "name": name,
            "dir": str(tmp_path),
            "num_steps": 2,
            "prompts_per_step": P,
            "group_size": G,
        },
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": "x.jsonl"},
    }
    for section, values in sections.items():
        base[section] = base.get(section, {}) | values
    return load_config(None, [], base)


def make_rollout(prompt: Prompt, step: int, k: int) -> Rollout:
    rng = np.random.default_rng([step, int(prompt.id[1:]), k])
    size = int(rng.integers(2, 7))
    length = len(prompt.token_ids) + size
    layer_major = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (2, length - 1, 1)), axis=-1)[
        ..., :2
    ].copy()
    gaps = np.zeros(length - 1, bool)
    gaps[-1] = k == 0
    return Rollout(
        id=f"{prompt.id}/{k}",
        tokens=np.concatenate([np.array(prompt.token_ids), rng.integers(1, 60, size)]),
        prompt_length=len(prompt.token_ids),
        rollout_logprobs=-rng.random(size).astype(np.float32),
        routed_experts=layer_major.transpose(1, 0, 2),
        finish_reason="length" if k else "stop",
        policy_versions=np.full(size, step, np.int32) + np.arange(size, dtype=np.int32) // 3,
        missing_routes=gaps if gaps.any() else None,
        teacher_logprobs=-rng.random(size).astype(np.float32) if k else None,
    )


def make_step(step: int) -> list[RolloutGroup]:
    groups = []
    for p in range(P):
        prompt = Prompt(f"q{p + 10 * step}", f"text {p}", (3,) * (p + 1), str(p))
        rollouts = tuple(make_rollout(prompt, step, k) for k in range(G))
        groups.append(RolloutGroup(prompt, rollouts, np.array([0.1 * p, 1 / 3], np.float32)))
    return groups


def write_steps(tmp_path, steps):
    """A run directory as two replicas leave it."""
    folder = tmp_path / "live"
    for dp_rank in (0, 1):
        recorder = Recorder(folder, dp_rank=dp_rank, save_tensors=True)
        for step, content in steps:
            recorder.record(step, make_step(content)[dp_rank::2])
    (folder / "config.toml").write_text(dump_config(config(tmp_path, "live")))
    return folder


@pytest.fixture
def written(tmp_path):
    """In the former layout, where a resumed run could leave step 2 twice: the last one counts."""
    to_former_layout(write_steps(tmp_path, [(1, 0), (2, 7)]))
    return to_former_layout(write_steps(tmp_path, [(2, 1)]))


ALLOWED = {"replay": {"on_missing_route": "live", "missing_route_budget": 1.0}}


@pytest.mark.parametrize("layout", ["present", "former", "resumed after an update"])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_records_come_back_for_any_number_of_replicas(tmp_path, dp_size, layout):
    written = write_steps(tmp_path, [(1, 0), (2, 7)])
    if layout != "present":
        to_former_layout(written)
    write_steps(tmp_path, [(2, 1)])  # again, as by a resumed run
    if layout == "former":
        to_former_layout(written)
    saved = SavedSteps(written, config(tmp_path, **ALLOWED), SPEC)
    for step in (0, 1):
        groups = make_step(step)
        for dp_rank in range(dp_size):
            loaded = saved.groups(step, dp_rank, dp_size)
            assert [group.prompt for group in loaded] == [
                group.prompt for group in groups[dp_rank::dp_size]
            ]
            for found, group in zip(loaded, groups[dp_rank::dp_size], strict=True):
                assert found.rewards.dtype == np.float32 and np.array_equal(
                    found.rewards, group.rewards
                )
                for one, other in zip(found.rollouts, group.rollouts, strict=True):
                    assert vars(replace(one, response_text="")).keys() == vars(other).keys()
                    for name, value in vars(other).items():
                        assert np.array_equal(getattr(one, name), value), name
                    assert one.routed_experts.dtype == np.uint8 and one.tokens.dtype == np.int64
                    assert one.routed_experts.transpose(1, 0, 2).flags.c_contiguous


def test_steps_may_be_of_different_numbers_of_replicas(tmp_path):
    """Resumed on one replica after the first step of two."""
    folder = tmp_path / "live"
    for dp_rank in (0, 1):
        Recorder(folder, dp_rank=dp_rank, save_tensors=True).record(1, make_step(0)[dp_rank::2])
    Recorder(folder, save_tensors=True).record(2, make_step(1))
    (folder / "config.toml").write_text(dump_config(config(tmp_path, "live")))
    saved = SavedSteps(folder, config(tmp_path, **ALLOWED), SPEC)
    for step in (0, 1):
        assert [group.prompt for group in saved.groups(step, 0, 1)] == [
            group.prompt for group in make_step(step)
        ]


def test_a_prompt_drawn_twice_in_a_step_is_two_groups(tmp_path):
    groups = make_step(0)[:2]
    again = replace(
        groups[0],
        rollouts=tuple(
            replace(r, rollout_logprobs=r.rollout_logprobs - 1) for r in groups[0].rollouts
        ),
    )
    Recorder(tmp_path / "live", save_tensors=True).record(
        1, with_unique_ids([groups[0], again, groups[1]])
    )
    (tmp_path / "live/config.toml").write_text(dump_config(config(tmp_path, "live")))
    cfg = config(tmp_path, run={"prompts_per_step": 3, "num_steps": 1}, **ALLOWED)
    loaded = SavedSteps(tmp_path / "live", cfg, SPEC).groups(0, 0, 1)
    assert [group.prompt.id for group in loaded] == ["q0", "q0", "q1"]
    for found, group in zip(loaded, [groups[0], again, groups[1]], strict=True):
        for one, other in zip(found.rollouts, group.rollouts, strict=True):
            assert np.array_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_routes_are_not_loaded_where_the_run_does_not_need_them(written, tmp_path):
    cfg = config(tmp_path, replay={"mode": "none", "measure": False})
    assert SavedSteps(written, cfg, SPEC).groups(0, 0, 1)[0].rollouts[0].routed_experts is None


def test_a_run_of_version_0_1_wrote_its_first_step_as_0(written, tmp_path):
    """It is known by the former name of a setting in its config.toml."""
    for path in written.glob("rollouts*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"step": row["step"] - 1}) + "\n" for row in rows))
    for path in sorted(written.glob("rollouts*.safetensors")):
        stem, _, step = path.stem.rpartition("_")
        path.rename(path.with_name(f"{stem}_{int(step) - 1:06d}.safetensors"))
    config_file = written / "config.toml"
    config_file.write_text(config_file.read_text().replace("weight_sync = ", "push = "))
    saved = SavedSteps(written, config(tmp_path, **ALLOWED), SPEC)
    assert [group.prompt.id for group in saved.groups(1, 0, 1)] == [
        group.prompt.id for group in make_step(1)
    ]


def test_steps_before_a_checkpoint_are_not_required(written, tmp_path):
    for path in written.glob("rollouts*.jsonl"):
        path.write_text(
            "".join(
                line + "\n"
                for line in path.read_text().splitlines()
                if json.loads(line)["step"] == 2
            )
        )
    assert (
        len(SavedSteps(written, config(tmp_path, **ALLOWED), SPEC, first_step=1).groups(1, 0, 1))
        == P
    )
    with pytest.raises(ValueError, match=r"no rollouts of step 1"):
        SavedSteps(written, config(tmp_path, **ALLOWED), SPEC)


def edit_tensors(written, edit):
    for path in written.glob("*.safetensors"):
        save_file(edit(load_file(path)), path)


def without(kind):
    return lambda tensors: {
        name: value for name, value in tensors.items() if not name.endswith(kind)
    }


def all_taught(tensors):
    """With a teacher's log-prob of every sampled token."""
    sampled = {name: value for name, value in tensors.items() if name.endswith(":logprobs")}
    return tensors | {
        name.replace(":logprobs", ":teacher_logprobs"): value for name, value in sampled.items()
    }


REFUSED = {  # what differs: (sections of the configuration, model, change of the files, message)
    "own directory": ({"run": {"name": "live"}}, SPEC, None,
    r"this run's own directory.*--run\.name"),
    "more steps": ({"run": {"num_steps": 3}}, SPEC, None,
    r"no rollouts of step 3.*steps 1 to 2; set run\.num_steps = 2"),
    "group size": ({"run": {"group_size": 3}}, SPEC, None,
    r"2 responses.*run\.group_size = 3; set run\.group_size = 2"),
    "prompts": ({"run": {"prompts_per_step": 8}}, SPEC, None,
    r"\[2, 2\] prompts.*run\.prompts_per_step = 8.*set .* = 4"),
    "model": ({"model": {"path": "other"}}, SPEC, None,
    r"model\.path = other: must be as in .*config\.toml.*set --model\.path"),
    "temperature": ({"rollout": {"temperature": 0.5}}, SPEC, None,
    r"rollout\.temperature = 0\.5: must be as in .*1\.0"),
    "top-k": ({}, replace(SPEC, top_k=3), None,
    r"expert ids of shape \[\d+, 2, 2\]: must be \[\d+, 2, 3\].*set model\.path"),
    "MoE layers": ({}, replace(SPEC, moe_layers=(0, 1, 2)), None, r"must be \[\d+, 3, 2\]"),
    "missing routes, sampled again": (
        {"replay": {"on_missing_route": "drop_sample"}}, SPEC, None,
        r"needs a server; set replay\.on_missing_route",
    ),
    "no teacher": ({"teachers": {"math": {"urls": ["http://a"]}}}, SPEC, None,
    r"q0/0 has no log-probs of a teacher, and teachers\.math scores its source"),
    "no most probable tokens of the teacher": (
        {
            "teachers": {"math": {"urls": ["http://a"]}},
            "loss": {"teacher_form": "forward", "teacher_top_k": 4},
        },
        SPEC, lambda f: edit_tensors(f, all_taught),
        r"q0/0 has no most probable tokens of its teacher, and loss\.teacher_top_k = 4",
    ),
    "no routes": ({}, SPEC, lambda f: edit_tensors(f, without(":routed_experts")),
    r"no expert ids: replay\.mode = R3"),
    "a replica's file gone": ({}, SPEC, lambda f: (f / "rollouts.dp1.jsonl").unlink(),
    r"\[2\] prompts in 1 file"),
    "a side file gone": ({}, SPEC, lambda f: (f / "rollouts.dp1_000001.safetensors").unlink(),
    r"no tensors.*--only rollout"),
    "a side file cut": ({}, SPEC,
    lambda f: (f / "rollouts_000001.safetensors").write_bytes(b"12345678"), r"no tensors"),
    "not a run": ({}, SPEC, lambda f: (f / "config.toml").unlink(),
    r"a run directory with its config\.toml"),
    "lines gone": ({}, SPEC, lambda f: (f / "rollouts.jsonl").write_text(
        "".join((f / "rollouts.jsonl").read_text().splitlines(keepends=True)[1:])),
        r"rollout q0/0 has no line"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rollouts_that_do_not_fit_are_refused_before_anything_is_trained(case, written, tmp_path):
    sections, spec, change, message = REFUSED[case]
    if change is not None:
        change(written)
    sections = ALLOWED | sections
    with pytest.raises(ValueError, match=message):
        SavedSteps(written, config(tmp_path, **sections), spec)


def test_routes_without_their_digest_are_refused(written, tmp_path):
    edit_tensors(written, without(":routes_digest"))
    with pytest.raises(ValueError, match=r"expert ids without their digest"):
        SavedSteps(written, config(tmp_path, **ALLOWED), SPEC).groups(0, 0, 1)


def test_tokens_of_another_vocabulary_and_cut_tensors_are_refused(written, tmp_path):
    saved = SavedSteps(written, config(tmp_path, **ALLOWED), replace(SPEC, vocab_size=4))
    with pytest.raises(ValueError, match=r"below the vocabulary 4"):
        saved.groups(0, 0, 1)

    def cut(tensors):
        is_cut = {name: name.endswith(":logprobs") for name in tensors}
        return {name: value[:-1] if is_cut[name] else value for name, value in tensors.items()}

    edit_tensors(written, cut)
    with pytest.raises(
        ValueError, match=r"log-probs and \d weight versions must describe one response"
    ):
        SavedSteps(written, config(tmp_path, **ALLOWED), SPEC).groups(0, 0, 1)


def test_lines_of_older_files_have_one_version_for_the_entire_response(written, tmp_path):
    path = written / "rollouts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["policy_versions"]
    path.write_text("".join(json.dumps(row | {"policy_version": 5}) + "\n" for row in rows))
    groups = SavedSteps(written, config(tmp_path, **ALLOWED), SPEC).groups(0, 0, 2)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.policy_versions.tolist() == [5] * rollout.response_length


def test_versions_of_other_tokens_are_refused(written, tmp_path):
    path = written / "rollouts.jsonl"
    path.write_text(
        path.read_text().replace('"policy_versions": [[', '"policy_versions": [[9, 1], [')
    )
    with pytest.raises(ValueError, match=r"weight versions must describe one response"):
        SavedSteps(written, config(tmp_path, **ALLOWED), SPEC).groups(0, 0, 1)


def test_a_line_with_an_unknown_finish_reason_is_refused(written, tmp_path):
    """batch.filter_truncated reads it: an unknown word would count as not truncated."""
    path = written / "rollouts.jsonl"
    path.write_text(
        path.read_text().replace('"finish_reason": "stop"', '"finish_reason": "lenght"')
    )
    saved = SavedSteps(written, config(tmp_path, **ALLOWED), SPEC)
    with pytest.raises(ValueError, match=r"finish_reason = 'lenght': must be stop or length"):
        saved.groups(0, 0, 1)
