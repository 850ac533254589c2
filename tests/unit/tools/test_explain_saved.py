"""explain-mismatch with what a run has saved: which sequences it takes, when it says that a
difference began.
"""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.transfer import encode_samples
from megatron_rl.checkpoint.batches.bundle_header import VERSION, Header
from megatron_rl.checkpoint.batches.bundle_sequences import BundleError, rank_name, replica_name
from megatron_rl.config import load_config
from megatron_rl.metrics.lines import append_lines
from megatron_rl.records import Prompt, Rollout, RolloutGroup, routes_digest
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice, Recorder
from megatron_rl_tools.explain_mismatch import explain_mismatch, history, weights
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.explain_mismatch import main
from megatron_rl_tools.explain_mismatch.ladder import NOT_ON_CPU, Explanation
from megatron_rl_tools.explain_mismatch.token_inputs import read_bundle, read_run, run_config
from megatron_rl_tools.explain_mismatch.verdicts import verdicts_of
from tests.unit.tools.test_explain_mismatch import HEALTHY, make_run, sequences, with_routes


def group(prompt: str, rollouts: list[Rollout]) -> RolloutGroup:
    named = [each.named(f"{prompt}/{number}") for number, each in enumerate(rollouts)]
    return RolloutGroup(Prompt(prompt, "", (1,), ""), tuple(named))


def save_halves(
    run: Path,
    step: int,
    rollouts: list[Rollout],
    halves: list,
    keys: list[str],
    name: str = "trained",
):
    """The trainer's half, as trainer/recording/token_files.py writes it."""
    tensors = {}
    for key, half in zip(keys, halves, strict=True):
        tensors |= {
            f"{key}:old_logprobs": half.logprobs,
            f"{key}:own_experts": half.routes.astype(np.uint8),
        }
    save_file(tensors, run / f"{name}_{step:06d}.safetensors", metadata={"schema": "1"})
    with open(run / f"{name}.jsonl", "a") as file:
        for each, key in zip(rollouts, keys, strict=True):
            line = {"step": step, "id": each.id, "key": key, "sampled_by": "rollouts"}
            file.write(json.dumps(line | {"tensors": f"{name}_{step:06d}.safetensors"}) + "\n")


# Which sequences


def read(run: Path) -> list[Rollout]:
    with open(run / "config.toml", "a") as file:
        file.write('[rollout]\ndtype = "float32"\n')
    saved = read_run(run, lambda base, longest: base, None)
    return [] if saved is None else list(saved.rollouts)


def ids_read(run: Path) -> list[str]:
    return [rollout.id for rollout in read(run)]


def test_of_a_share_of_saved_tensors_those_are_read(tmp_path):
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    Recorder(run, save_tensors=GroupChoice(0.3)).record(
        1, [group(name, rollouts) for name in "abc"]
    )
    ids = ids_read(run)
    assert len(ids) == len(rollouts) and len({name[0] for name in ids}) == 1


def test_all_replicas_are_read(tmp_path):
    """Equally many of each; ids that two replicas share stay distinct, and each keeps its own
    tokens.
    """
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    rollouts = [rollouts[index % len(rollouts)] for index in range(16)]
    for replica in range(3):
        own = [replace(each, tokens=each.tokens + replica, routes_digest=None) for each in rollouts]
        own = [
            replace(each, routes_digest=routes_digest(each.tokens, each.routed_experts))
            for each in own
        ]
        Recorder(run, dp_rank=replica, save_tensors=True).record(1, [group("a", own)])
    saved = read(run)
    expected = [
        f"a/{number}{file}"
        for number in range(8)
        for file in ("", "@rollouts.dp1", "@rollouts.dp2")
    ]
    assert [each.id for each in saved] == expected
    for index, each in enumerate(saved):
        assert (each.tokens == rollouts[index // 3].tokens + index % 3).all()


def test_the_first_replica_may_have_no_tensors(tmp_path):
    """As with a small share of saved groups."""
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    for replica in range(2):
        Recorder(run, dp_rank=replica, save_tensors=replica == 1).record(1, [group("a", rollouts)])
    assert ids_read(run) == [f"a/{number}@rollouts.dp1" for number in range(len(rollouts))]


def test_a_step_without_tensors_is_not_read(tmp_path):
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    Recorder(run, save_tensors=True).record(1, [group("a", rollouts)])
    path = run / "rollouts/step_000001.jsonl"
    path.write_text(path.read_text().replace('"a/', '"b/'))
    assert ids_read(run) == []


def test_of_a_step_written_twice_the_last_attempt_is_read(tmp_path):
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    for _ in range(2):
        Recorder(run, save_tensors=True).record(1, [group("a", rollouts)])
    assert ids_read(run) == [f"a/{number}" for number in range(len(rollouts))]


def test_the_trainers_half_is_found_by_its_key(tmp_path):
    run, (rollouts, halves) = make_run(tmp_path / "run", [1e-4] * 3), sequences()
    Recorder(run, save_tensors=True).record(
        1, [RolloutGroup(Prompt("q", "", (1,), ""), tuple(rollouts))]
    )
    save_halves(run, 1, rollouts, halves, [f"{each.id}@rollouts.dp1" for each in rollouts])
    assert history.read_history(run).notes == (
        "step 1: 4 sequences with the halves of both engines",
    )


# When it began


@pytest.mark.parametrize(
    ("values", "began"),
    [
        ([1e-9] * 4 + [5e-6] * 4, None),  # rounding that grows
        ([1e-3, *[1e-2] * 5], None),  # one step before says nothing
        ([1e-3] * 5 + [1e-2] * 2, None),  # two steps may be outliers
        ([1e-3] * 5 + [1e-2] * 3, 5),
        ([1e-3] * 3 + [1e-2] * 3, 3),
    ],
)
def test_a_beginning_is_above_rounding_and_lasts(values, began):
    assert history.since_when(np.array(values)) == began


def test_flips_that_stay_zero_do_not_grow(tmp_path):
    run = make_run(tmp_path / "run", [1e-4] * 6 + [5e-2] * 4, routing__router_mismatch=[0.0] * 10)
    found = history.read_history(run)
    assert found.evidence["ratio.routing/router_mismatch"] == 1 and [
        each.name for each in found.verdicts
    ] == ["began"]


def test_a_proof_is_told_although_nothing_grew(tmp_path):
    run, (rollouts, halves) = make_run(tmp_path / "run", [1e-2] * 3), sequences()
    moved = with_routes(rollouts, lambda ids: np.ascontiguousarray(np.roll(ids, 1, axis=0)))
    Recorder(run, save_tensors=True).record(
        1, [RolloutGroup(Prompt("q", "", (1,), ""), tuple(moved))]
    )
    save_halves(run, 1, moved, halves, [each.id for each in moved])
    found = history.read_history(run)
    text = "\n".join(found.lines())
    assert found.began is None and found.accuses and history.NO_BEGINNING in text
    assert "CAUSE routes_shifted: the server's routes" in text and "not measured" not in text


def test_a_text_with_another_separator_of_lines_is_one_event(tmp_path):
    event = {"step": 3, "kind": "stop", "text": "a\u2028b\u0085c"}
    append_lines(tmp_path / "events.jsonl", [event])
    assert history.events_near(tmp_path, 3) == ["step 3, stop: a\u2028b\u0085c"]


# The command


def test_the_history_is_shown_where_the_ladder_cannot_run(tmp_path, capsys):
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4] * 4), sequences()
    Recorder(run, save_tensors=True).record(1, [group("a", rollouts)])
    page = tmp_path / "page.html"
    assert main([str(run), "--output", str(page)]) == 2  # model.path = "/nowhere"
    shown = capsys.readouterr()
    assert history.NO_BEGINNING in shown.out and "no ladder: model.path = /nowhere" in shown.out
    assert "model.path = /nowhere" in shown.err and "no ladder" in page.read_text()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ReadError("cut"), "--url: the server stopped answering (ReadError: cut)"),
        (torch.OutOfMemoryError("20 GiB"), "use --device cpu"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "lower --longest or --prompts",
        ),
    ],
)
def test_a_failure_is_no_cause(error, message, monkeypatch, capsys):
    def fail(args: Namespace) -> None:
        raise error

    monkeypatch.setattr(explain_mismatch, "of_server", fail)
    assert main(["--url", "http://127.0.0.1:9", "--model", "/nowhere"]) == 2
    assert message in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shape"):
        explain_mismatch.describe_error(RuntimeError("shape"))


def test_the_trainer_has_the_servers_dtype_unless_one_is_named():
    cfg = load_config(
        None, [], {"model": {"path": "/nowhere", "dtype": "float32"}, "data": {"train": "unused"}}
    )
    for options, served, expected in (
        (Namespace(dtype=None, config=None), "bfloat16", "bfloat16"),
        (Namespace(dtype="float32", config=None), "bfloat16", "float32"),
        (Namespace(dtype=None, config=Path("run.toml")), "bfloat16", "float32"),
        (Namespace(dtype=None, config=None), "float16", "float32"),
    ):
        assert explain_mismatch.with_dtype(cfg, options, served).model.dtype == expected


# Verdicts


def test_wrong_routes_differ_clearly_more_than_own_ones():
    near = Evidence(HEALTHY | {"diff.live": 0.9e-4, "diff.replay": 1.1e-4, "routes.row_shift": 0.0})
    near |= {"routes.layer_shift": 0.0, "routes.foreign": 0.0}
    assert "routes_wrong" not in [each.name for each in verdicts_of(near)]
    assert "routes_wrong" in [
        each.name for each in verdicts_of(Evidence(near | {"diff.replay": 1.9e-4}))
    ]


def test_limits_are_of_the_cpu():
    found = Evidence(HEALTHY | {"limit.note": NOT_ON_CPU.format("cuda")})
    explanation = Explanation(found, (), ())
    assert "not on cuda" in explain_mismatch.describe_inputs(explanation)[-1]
    assert "HEALTHY" in explain_mismatch.describe_inputs(explanation)[-2]


def test_what_only_the_trainers_dtype_rounds_is_not_another_version(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = {
        f"model.layers.{n}.input_layernorm.weight": torch.randn(64, generator=generator)
        for n in range(3)
    }
    save_torch(values, tmp_path / "model.safetensors")
    theirs = weights.digests_of_model(values, torch.float32).digests()
    exported = {name: value.bfloat16() for name, value in values.items()}
    model = Namespace(path=tmp_path, dtype="bfloat16")
    trainer = Namespace(export=lambda: iter(exported.items()), cfg=Namespace(model=model))
    found = weights.compare_weights(trainer, [theirs], torch.float32, tmp_path)
    assert found.compared == 3 and not found.wrong and set(found.dtypes) == set(values)
    exported["model.layers.1.input_layernorm.weight"] += 1
    found = weights.compare_weights(trainer, [theirs], torch.float32, tmp_path)
    assert set(found.wrong) == {"model.layers.1.input_layernorm.weight"}


def explained(sections: dict[str, dict[str, object]]):
    values = {"model": {"path": "/nowhere"}, "data": {"train": "unused"}}
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    args = Namespace(
        model=Path("/nowhere"), device="cpu", dtype=None, config=None, temperature=None
    )
    base = load_config(None, [], values)
    return explain_mismatch.explain_config(args, longest=100, base=base)


def test_the_trainer_packs_rows_although_the_run_pads_them():
    """The live choices are read from packed rows."""
    cfg = explained({"model": {"batch_format": "bshd", "layer_spec": "local"}})
    assert cfg.model.batch_format == "thd" and cfg.model.layer_spec == "local"


def test_a_run_with_single_responses_can_be_explained():
    sections = {"run": {"group_size": 1}, "advantage": {"kind": "batch_whitened"}}
    cfg = explained(sections)
    assert cfg.run.device == "cpu" and cfg.run.max_tokens_per_micro_batch == 1024


# A mini-batch, and adapters


def make_bundle(folder: Path, *, update: int, loss: str = "grpo", **header: object) -> Path:
    """A bundle of step 1 (counted from 0) whose tokens version 0 sampled."""
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/config.json").write_text("{}")
    base = {"model": {"path": "/nowhere"}, "data": {"train": "unused"}, "loss": {"name": loss}}
    if loss == "sft":
        base |= {"run": {"group_size": 1}, "replay": {"mode": "none", "measure": False}}
    keys = dict.fromkeys(Header.__required_keys__) | {
        "version": VERSION, "step": 1, "update": update, "weights": "weights", "replicas": 1,
        "ranks": 1, "config": base | {"rollout": {"dtype": "float32"}},
    }  # fmt: skip
    (folder / "bundle.json").write_text(json.dumps(keys | header))
    rollouts, _ = sequences()
    samples = encode_samples([Sample(each, 0.0) for each in rollouts])
    rows = torch.tensor([len(each.tokens) for each in rollouts])
    save_torch({"0:samples": torch.from_numpy(samples), "0:rows": rows}, folder / replica_name(0))
    save_torch({"place": torch.tensor([0])}, folder / rank_name(0))
    return folder


def test_a_bundle_whose_weights_did_not_sample_is_refused(tmp_path):
    """The weights of a later update, and those younger than the tokens (rollout.max_staleness)."""
    second = make_bundle(tmp_path / "second", update=1, policy_version=0)
    stale = make_bundle(tmp_path / "stale", update=0)
    named = make_bundle(tmp_path / "named", update=0, policy_version=0)
    for folder in (second, stale):
        with pytest.raises(BundleError, match=r"versions \[0\].*--model"):
            read_bundle(folder, lambda base, longest: base, None)
        assert read_bundle(folder, lambda base, longest: base, stale / "weights").rollouts
    assert len(read_bundle(named, lambda base, longest: base, None).rollouts) == 4


def test_a_bundle_of_saved_rollouts_is_refused(tmp_path):
    """Version 1 of another run (--from-rollouts) is not version 1 of this one."""
    rollouts_of = {"policy_version": 0, "rollouts_of": "runs/other"}
    folder = make_bundle(tmp_path / "bundle", update=0, **rollouts_of)
    with pytest.raises(BundleError, match=r"rollouts_of = runs/other.*--model"):
        read_bundle(folder, lambda base, longest: base, None)
    assert read_bundle(folder, lambda base, longest: base, folder / "weights").rollouts


def test_a_bundle_of_supervised_training_is_refused_by_name(tmp_path):
    folder = make_bundle(tmp_path / "sft", update=0, policy_version=0, loss="sft")
    with pytest.raises(BundleError, match="is of megatron-rl sft"):
        read_bundle(folder, lambda base, longest: base, None)


def test_a_run_that_began_with_an_adapter_needs_merged_weights(tmp_path):
    run, (rollouts, _) = make_run(tmp_path / "run", [1e-4]), sequences()
    Recorder(run, save_tensors=True).record(1, [group("a", rollouts)])
    with open(run / "config.toml", "a") as file:
        file.write('[rollout]\ndtype = "float32"\n[lora]\nrank = 4\npath = "peft"\n')
    with pytest.raises(ValueError, match=r"lora.path = peft.*--model"):
        read_run(run, lambda base, longest: base, None)
    with pytest.raises(ValueError, match=r"lora.path = peft.*--model"):
        read_run(run, lambda base, longest: base, run_config(run).model.path)
    assert read_run(run, lambda base, longest: base, tmp_path) is not None


def test_a_server_of_a_run_that_began_with_an_adapter_needs_merged_weights(tmp_path):
    """The settings name the adapter; it would be missing in the trainer's half alone."""
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{tmp_path}/base"\n[data]\ntrain = "unused"\n[lora]\nrank = 4\n'
        'path = "peft"\n'
    )
    args = Namespace(device="cpu", dtype=None, config=config, temperature=None)
    args.model = tmp_path / "elsewhere/../base"
    with pytest.raises(ValueError, match=r"lora.path = peft.*merged with --model"):
        explain_mismatch.explain_config(args, longest=100)
    args.model = tmp_path / "merged"
    assert explain_mismatch.explain_config(args, longest=100).model.path == args.model


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    def fail(folder: Path) -> None:
        raise AssertionError("it reads the run")

    run = make_run(tmp_path / "run", [1e-4] * 4)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(explain_mismatch, "read_history", fail)
    for output in (tmp_path, tmp_path / "file/page.html"):
        assert main([str(run), "--output", str(output)]) == 2
        assert f"--output {output}: cannot be written" in capsys.readouterr().err


def test_a_page_that_fails_loses_no_result(tmp_path, monkeypatch, capsys):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    run = make_run(tmp_path / "run", [1e-4] * 4)
    monkeypatch.setattr(explain_mismatch, "write_page", fail)
    assert main([str(run), "--output", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr()
    assert history.NO_BEGINNING in shown.out and "No space left on device" in shown.err


@pytest.mark.parametrize(
    ("mode", "differences", "names"),
    [
        ("none", [4e-3] * 6 + [5e-2] * 6, ["began"]),  # experts agree as before
        ("R3", [4e-3] * 6 + [5e-2] * 6, ["not_replayed"]),
        ("R3", [4e-3] * 12, ["not_replayed"]),  # from the first step on
        ("none", [4e-3] * 12, []),
    ],
)
def test_replay_is_accused_under_r3_alone(mode, differences, names, tmp_path):
    run = make_run(
        tmp_path / "run",
        differences,
        routing__replayed_mismatch=[0.3] * 12,
        routing__router_mismatch=[0.002] * 12,
    )
    with open(run / "config.toml", "a") as file:
        file.write(f'[replay]\nmode = "{mode}"\n')
    assert [each.name for each in history.read_history(run).verdicts] == names
