"""check-rollouts reads files, digests, kept sets and model sizes itself.

It agrees with the trainer, and runs without it.
"""

import json
import sys
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import records as trainer
from megatron_rl.batch.codec import to_arrays
from megatron_rl.models.families import READERS, make_spec
from megatron_rl.models.known import KNOWN
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.teacher_scores import TeacherTop
from megatron_rl.records.token_sets import TokenSets
from megatron_rl.rollout.saved import recorded_rollouts, rollout_tensors
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl_tools.check_rollouts import model_sizes
from megatron_rl_tools.check_rollouts.check_rollouts import main
from megatron_rl_tools.check_rollouts.digests import digest_of_episode, digest_of_routes
from megatron_rl_tools.check_rollouts.dumped import RecordedRollout
from megatron_rl_tools.check_rollouts.mask_checks import decode_sets
from megatron_rl_tools.check_rollouts.model_sizes import FAMILIES, open_model
from megatron_rl_tools.check_rollouts.run_files import KINDS, read_dumps, read_records, read_steps
from megatron_rl_tools.verify_replay.fingerprints import Shape, make_given
from tests.families import COMMON
from tests.families import FAMILIES as CHECKPOINTS
from tests.unit.batch.rollouts import make_rollout, make_tree


def with_sets(rollout, rng):
    """The rollout with a kept set of 1 to 300 ids for every sampled token."""
    sets = [
        np.union1d(token, rng.integers(0, 200_000, rng.integers(1, 300)))
        for token in rollout.tokens[rollout.sampled]
    ]
    return replace(
        rollout, sampling_mask=TokenSets.of(np.array([*map(len, sets)]), np.concatenate(sets))
    )


def with_missing(rollout):
    missing = np.zeros(len(rollout.tokens) - 1, bool)
    missing[1::3] = True
    return replace(rollout, missing_routes=missing)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with turns, kept sets, missing routes, episodes of several sequences, and 16-bit
    ids.
    """
    folder, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    turns = make_given(
        Shape(2, 32, 4, 96, dp_size=1, cp_size=1, micro_batches=2, turns=3)
    ).rollouts(0)
    kinds = {
        "turns": [rollout.with_episode(turn_rewards=(0.0, 0.5, 1.0)) for rollout in turns],
        "sets": [with_sets(make_rollout("", 3, size, seed=size), rng) for size in (1, 5, 40)],
        "missing": [with_missing(make_rollout("", 3, 9)), with_missing(make_tree(""))],
        "trees": [make_tree("", seed=seed) for seed in (1, 2)],
        "wide": [
            make_rollout("", 4, 7, num_experts=300),
            make_rollout("", 4, 7, num_experts=300, seed=1),
        ],
        "plain": [make_rollout("", 2, 1, routes=False), make_tree("", routes=False)],
    }
    for step in (1, 2):
        groups = []
        for name, rollouts in kinds.items():
            named = tuple(rollout.named(f"{name}/{k}") for k, rollout in enumerate(rollouts))
            groups.append(
                RolloutGroup(
                    Prompt(name, "text", (1, 2), "label"), named, np.ones(len(named), np.float32)
                )
            )
        Recorder(folder, save_tensors=True).record(step, groups)
    return folder


def test_both_readers_read_the_same_run(written):
    records, findings = read_records(written, None), []
    dumps = list(read_dumps(records, findings))
    assert not findings and len(dumps) > 30
    assert any(dumped.environment for dumped in dumps) and any(
        dumped.missing is not None for dumped in dumps
    )
    for (path, step), lines in records.items():
        episodes = recorded_rollouts.read_episodes(path)[step]
        assert [vars(line) for line in lines] == [
            vars(line) for part in episodes.values() for line in part
        ]
        tensors = rollout_tensors.read_tensors(written, step)
        of_step = {dumped.record.id: dumped for dumped in dumps if dumped.record.step == step}
        for line in (line for part in episodes.values() for line in part):
            rollout = recorded_rollouts.to_rollout(
                line, lambda kind, of=tensors, at=line.id: of.get(f"{at}:{kind}")
            )
            dumped = of_step[line.id]
            assert dumped.environment == rollout.environment
            assert (dumped.digest, dumped.episode_digest) == (
                rollout.routes_digest,
                rollout.episode.digest,
            )
            for ours, theirs in (
                (dumped.tokens, rollout.tokens),
                (dumped.logprobs, rollout.rollout_logprobs),
                (dumped.routes, rollout.routed_experts),
                (dumped.missing, rollout.missing_routes),
            ):
                assert (ours is None) == (theirs is None) and (
                    ours is None or np.array_equal(ours, theirs)
                )


def test_both_compute_the_recorded_digests(written):
    dumps = list(read_dumps(read_records(written, None), []))
    routed = [dumped for dumped in dumps if dumped.digest is not None]
    for dumped in routed:
        assert digest_of_routes(dumped.tokens, dumped.routes, dumped.environment) == dumped.digest
    last = [dumped for dumped in dumps if dumped.episode_digest is not None]
    assert len(routed) > 20 and len(last) == 8
    for dumped in last:
        parts = [part for part in dumps if part.record.step == dumped.record.step]
        parts = [
            part for part in parts if dumped.record.id in (part.record.id, part.record.episode)
        ]
        assert len(parts) == 3 and digest_of_episode(parts) == dumped.episode_digest


def test_both_decode_the_same_kept_sets(written):
    masks = [
        dumped.mask
        for dumped in read_dumps(read_records(written, 1), [])
        if dumped.mask[0] is not None
    ]
    assert len(masks) == 3
    for sizes, codes in masks:
        ids, starts = decode_sets(sizes, codes)
        assert np.array_equal(ids, TokenSets(sizes, codes).ids()) and starts[0] == 0


DAMAGED = {
    "a number of six bytes": ([1], [*[128] * 5, 1]),
    "no last byte": ([1], [129]),
    "an empty set": ([2, 0], [1, 1]),
    "no codes": ([1], []),
    "no sets": ([], [1]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_both_refuse_damaged_kept_sets_in_the_same_words(damage):
    sizes, codes = (
        np.array(values, kind)
        for values, kind in zip(DAMAGED[damage], (np.uint16, np.uint8), strict=True)
    )
    with pytest.raises(ValueError) as expected:
        TokenSets(sizes, codes).ids()
    with pytest.raises(ValueError, match=f"^kept sets: {expected.value}$"):
        decode_sets(sizes, codes)


INTEGERS = st.sampled_from([np.uint8, np.int16, np.int32, np.int64])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(0, 3),
    INTEGERS,
    INTEGERS,
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_digests_agree_for_any_layout_and_type(size, layers, of_tokens, of_ids, is_view, seed):
    rng = np.random.default_rng(seed)
    tokens, spans = rng.integers(0, 99, size).astype(of_tokens), ((1, 2), (4, 6))[: seed % 3]
    routes = rng.integers(0, 99, (layers, size - 1, 2)).astype(of_ids).transpose(1, 0, 2)
    routes = routes if is_view else np.ascontiguousarray(routes)
    assert digest_of_routes(tokens, routes, spans) == trainer.routes_digest(tokens, routes, spans)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=6), max_size=5),
    st.binary(max_size=4),
    st.data(),
)
def test_kept_sets_agree_or_are_refused_alike(sets, tail, data):
    flat = np.array([id_ for kept in sets for id_ in kept], np.int64)
    mask = TokenSets.of(np.array([len(kept) for kept in sets], np.int64), flat)
    codes = np.concatenate([mask.codes, np.frombuffer(tail, np.uint8)])
    mask = TokenSets(mask.sizes, codes[: data.draw(st.integers(0, len(codes)))])
    try:
        expected = mask.ids()
    except ValueError as error:
        with pytest.raises(ValueError) as caught:
            decode_sets(mask.sizes, mask.codes)
        assert str(caught.value) == f"kept sets: {error}"
    else:
        assert np.array_equal(decode_sets(mask.sizes, mask.codes)[0], expected)


def test_a_line_has_the_fields_that_the_trainer_writes():
    def described(record):
        return [
            (part.name, part.default, part.default_factory is MISSING) for part in fields(record)
        ]

    assert described(RecordedRollout) == described(recorded_rollouts.RecordedRollout)
    complete = with_missing(with_sets(make_tree("x"), np.random.default_rng(0)))
    complete = replace(
        complete,
        environment=((4, 5),),
        sampling_mask=complete.sampling_mask.part(0, 5),
        teacher_logprobs=complete.rollout_logprobs,
        teacher_top=TeacherTop(complete.sampling_mask, complete.rollout_logprobs),
    )
    assert set(KINDS) == set(to_arrays(complete))


LINE = {
    "step": 1,
    "id": "0/0",
    "prompt_id": "0",
    "prompt": "",
    "response": "",
    "label": "",
    "reward": None,
    "advantage": None,
}
LINE |= {"prompt_length": 2, "response_length": 3, "finish_reason": "stop"}
WRONG = [
    {}, {"policy_versions": 3}, {"policy_versions": [[0]]}, {"policy_versions": [[0, 0]]},
    {"policy_versions": [[0, True]]}, {"policy_versions": [[0, 3, 1]]}, {"policy_versions": [[0.5,
    3]]},
    {"policy_versions": [[0, 3]], "surprise": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_both_refuse_the_same_lines_in_the_same_words(wrong, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        "".join(json.dumps(LINE | part) + "\n" for part in ({"policy_version": 0}, wrong))
    )
    errors = []
    for read in (read_steps, recorded_rollouts.read_episodes):
        with pytest.raises(ValueError, match=r"rollouts\.jsonl:2: not a rollout record") as caught:
            read(path)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_both_keep_the_last_of_an_episode_and_leave_out_a_cut_one(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    names = [
        ("0/0/0", "0/0"),
        ("0/0", ""),
        ("9/0/0", "9/0"),  # cut
        ("0/1", ""),
        ("0/0/0", "0/0"),
        ("0/0/1", "0/0"),
        ("0/0", ""),
        ("0/2/0", "0/2"),
    ]
    lines = [
        LINE | {"id": name, "episode": episode, "policy_versions": [[number, 3]]}
        for number, (name, episode) in enumerate(names)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [line for part in recorded_rollouts.read_episodes(path)[1].values() for line in part]
    assert [vars(line) for line in read_steps(path)[1]] == [vars(line) for line in expected]
    assert [line.policy_versions[0][0] for line in expected] == [3, 4, 5, 6]


def configs():
    for name, (prefix, own) in CHECKPOINTS.items():
        config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **own})
        yield (
            name,
            json.loads(config.to_json_string()) | {"architectures": [f"{prefix}ForCausalLM"]},
        )
    yield from KNOWN.items()
    qwen = KNOWN["qwen3-30b-a3b"]
    yield "every second layer", qwen | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}
    yield (
        "nulls",
        qwen | {"decoder_sparse_step": None, "mlp_only_layers": None, "moe_layer_freq": None},
    )
    yield (
        "another name",
        {key: value for key, value in qwen.items() if key != "num_experts"}
        | {"num_local_experts": 64},
    )


CONFIGS = dict(configs())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sizes_of_every_family_are_those_of_the_trainer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(model_sizes, "find_spec", lambda package: None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model, spec = open_model(tmp_path, "float32"), make_spec(CONFIGS[name])
    assert vars(model.sizes) == {part.name: getattr(spec, part.name) for part in fields(ModelSizes)}
    assert model.forward is None and model.notes == ()


def test_the_families_are_those_of_the_trainer():
    assert (
        set(FAMILIES) == set(READERS) == {config["architectures"][0] for config in CONFIGS.values()}
    )


@pytest.fixture
def alone(monkeypatch):
    """As if megatron_rl were not installed; tests/repo/test_packaging.py is without it."""
    monkeypatch.setattr(model_sizes, "find_spec", lambda package: None)


def report(capsys, *arguments):
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "config", [{"architectures": ["GptOssForCausalLM"]}, {}, {"moe_layer_freq": [0, 1]}]
)
def test_a_model_that_is_not_known_leaves_out_its_checks_and_says_so(
    config, written, alone, tmp_path, capsys
):
    if "moe_layer_freq" in config:
        config = KNOWN["kimi-k2"] | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected, got = report(capsys, written), report(capsys, written, "--model", tmp_path)
    (note,) = got[1].pop("notes")
    assert "4 checks run without the model's sizes: shape, range, dtype, mask" in note
    assert config.get("architectures", ["(none)"])[0] in note
    assert got[1].pop("unchecked") == {"canary": "needs megatron_rl; in a checkout: pip install ."}
    assert got[1].pop("checks") == [*expected[1].pop("checks"), "canary"]
    assert got[0] == expected[0] and {**got[1], "notes": [], "unchecked": {}} == expected[1]


def test_a_known_model_is_compared_without_the_trainer(written, alone, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen3-30b-a3b"]))
    status, got = report(capsys, written, "--model", tmp_path)
    assert status == 1 and got["unchecked"].keys() == {"canary"} and got["canary"] is None
    assert any(
        "the model has 48 MoE layers x top-8" in finding["found"] for finding in got["findings"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json: No such file or directory; give an HF checkpoint directory"),
        ("{", "not valid JSON"),
        ("[]", "must hold one JSON object"),
        ('{"architectures": ["Qwen3MoeForCausalLM"]}', "key num_hidden_layers is missing"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named(text, message, written, alone, tmp_path, capsys):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main([str(written), "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-rl check-rollouts: ")
    assert message.replace("\\", "") in error


def test_a_pt_file_without_torch_says_what_to_install(tmp_path, monkeypatch, capsys):
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "0.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        "0.pt: .pt files are read by torch, which is missing: pip install torch\n"
    )
