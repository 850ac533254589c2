"""The trainer's half on disk: keys, flags, summaries, a step written again, a disk that is full."""

import json
import logging
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.records.packed import Sample
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.trainer.recording.token_files import Flag, SequenceTokens, Table, TokenFiles
from tests.unit.batch.rollouts import make_rollout

L, K = 10, 2  # 10 layers: the flips of a row take two bytes
SUMMARY = (4.0, 2.0, 1.0, 1.0, 6.0, 8.0, -3.0, 5.0, 20.0, 0.75, 0.5)


def make_sequences(names, *, step=0, ids=np.uint8):
    """All of one micro-batch, every second one chosen; values count up, so that each place is
    known.
    """
    samples = []
    for index, name in enumerate(names):
        rollout = make_rollout(name, 2 + index, 4, layers=L, seed=step)
        samples.append(
            Sample(rollout, 0.5 + index, save_tokens=index % 2 == 0, sampled_by=index // 2)
        )
    chosen = [sample.rollout for sample in samples if sample.save_tokens]
    rows, tokens = sum(len(r.tokens) - 1 for r in chosen), sum(r.response_length for r in chosen)
    table = Table.zeros(L, rows, K, tokens, np.dtype(ids))
    table.values[:] = np.arange(table.values.size).reshape(table.values.shape)
    table.values[-1] = np.arange(tokens) % 2 * Flag.CLIPPED_LOW
    table.own_experts[:] = np.arange(rows)[None, :, None]
    table.margins[:] = np.arange(L)[:, None]
    table.flipped[:] = np.arange(L)[:, None] % 3 == 0
    return [SequenceTokens(1, sample, SUMMARY, table) for sample in samples]


def write(folder, sequences, step=7, **options):
    files = FileWriter(logging.getLogger("test").warning)
    TokenFiles(folder, files, **({"dp_rank": 0, "mask_missing_routes": False} | options)).write(
        step, sequences
    )
    files.close()
    return files.failed


@pytest.mark.parametrize("ids", [np.uint8, np.int16])
def test_each_sequence_has_its_rows(tmp_path, ids):
    sequences = make_sequences(["a/0", "a/1", "b/0"], ids=ids)
    assert write(tmp_path, sequences) == 0
    found = load_file(tmp_path / "trained/step_000007.safetensors")
    assert {key.rpartition(":")[0] for key in found} == {"a/0", "b/0"}
    first, last = (sequences[i].sample.rollout for i in (0, 2))
    assert (
        found["b/0:own_experts"].shape == (len(last.tokens) - 1, L, K)
        and found["b/0:own_experts"].dtype == ids
    )
    assert found["b/0:own_experts"][:, 0, 0].tolist() == list(
        range(len(first.tokens) - 1, len(first.tokens) + len(last.tokens) - 2)
    )
    assert found["b/0:logprobs"].shape == (1, 4) and found["b/0:old_logprobs"].tolist() == [
        4.0,
        5.0,
        6.0,
        7.0,
    ]
    assert found["b/0:margin"].dtype == np.float16 and found["b/0:margin"][0].tolist() == list(
        range(L)
    )
    bits = np.unpackbits(found["b/0:flips"], axis=1, count=L, bitorder="little")
    assert bits.shape == (len(last.tokens) - 1, L) and np.flatnonzero(bits[0]).tolist() == [
        0,
        3,
        6,
        9,
    ]
    assert found["a/0:advantage"].tolist() == [0.5] and found["b/0:flags"].dtype == np.uint8
    with safe_open(tmp_path / "trained/step_000007.safetensors", framework="numpy") as file:
        assert file.metadata() == {"schema": "1"}


def test_the_rows_of_each_micro_batch_begin_at_its_first(tmp_path):
    first, second = make_sequences(["a/0", "a/1", "b/0"]), make_sequences(["c/0", "c/1", "d/0"])
    assert write(tmp_path, [*first, *second]) == 0
    found = load_file(tmp_path / "trained/step_000007.safetensors")
    assert {key.rpartition(":")[0] for key in found} == {"a/0", "b/0", "c/0", "d/0"}
    for one, other in (("a/0", "c/0"), ("b/0", "d/0")):
        for kind in (*Table.VALUES, "own_experts", "margin", "flips"):
            assert np.array_equal(found[f"{one}:{kind}"], found[f"{other}:{kind}"]), kind


def test_a_line_is_written_after_the_tensors_that_it_names(tmp_path):
    written = []
    TokenFiles(
        tmp_path,
        SimpleNamespace(later=lambda path, work: written.append(path.name)),
        dp_rank=1,
        mask_missing_routes=False,
    ).write(7, make_sequences(["a/0"]))
    assert written == ["step_000007.dp1.safetensors", "step_000007.dp1.jsonl"]


def test_copies_that_fill_micro_batches_have_no_line(tmp_path):
    sequences = make_sequences(["a/0", "a/1", "b/0"])
    copy = replace(
        sequences[0],
        sample=replace(sequences[0].sample, in_loss=False, episode_length=0, save_tokens=False),
    )
    assert write(tmp_path, [copy, *sequences, copy, copy]) == 0
    lines = map(json.loads, (tmp_path / "trained/step_000007.jsonl").read_text().splitlines())
    assert [line["key"] for line in lines] == ["a/0", "a/1", "b/0"]


def test_every_sequence_has_a_line_and_means_have_a_denominator(tmp_path):
    none = (0.0,) * 7 + (0.0, 0.0, 0.0, 0.0)
    sequences = make_sequences(["a/0", "a/1"])
    write(tmp_path, [sequences[0], replace(sequences[1], summary=none)], dp_rank=3)
    first, second = map(
        json.loads, (tmp_path / "trained/step_000007.dp3.jsonl").read_text().splitlines()
    )
    assert first == {
        "schema": 1, "step": 7, "id": "a/0", "sampled_by": "rollouts",
        "tensors": "trained/step_000007.dp3.safetensors",
        "key": "a/0", "mini_batch": 1, "kl": 0.5, "kl_k3": 0.25, "clipped_frac": 0.25,
        "weight_mean": 1.5,
        "entropy_mean": 2.0, "max_log_ratio": 0.75, "max_staleness": 0.5, "flip_frac": 0.25,
        "loss": -3.0,
    }  # fmt: skip
    assert (
        second["tensors"] is None
        and second["kl"] is second["flip_frac"] is second["max_log_ratio"] is None
    )
    assert second["max_staleness"] is None


def test_equal_ids_of_two_replicas_keep_their_tensors(tmp_path):
    sequences = make_sequences(["a/0", "x", "a/0"])
    write(tmp_path, sequences)
    lines = [
        json.loads(line)
        for line in (tmp_path / "trained/step_000007.jsonl").read_text().splitlines()
    ]
    assert [line["key"] for line in lines] == ["a/0", "x", "a/0@rollouts.dp1"]
    found = load_file(tmp_path / "trained/step_000007.safetensors")
    assert found["a/0:old_logprobs"][0] == 0.0 and found["a/0@rollouts.dp1:old_logprobs"][0] == 4.0


def test_flags_that_the_loss_does_not_know(tmp_path):
    sequences = make_sequences(["a/0", "x", "b/0"])
    missing = np.zeros(len(sequences[0].sample.rollout.tokens) - 1, bool)
    # the first is of the prompt alone, the second predicts the second sampled token
    missing[[0, 2]] = True
    rollout = replace(sequences[0].sample.rollout, missing_routes=missing)
    given = [
        replace(sequences[0], sample=replace(sequences[0].sample, rollout=rollout)),
        sequences[1],
        replace(sequences[2], sample=replace(sequences[2].sample, in_loss=False)),
    ]
    for masked in (False, True):
        write(tmp_path, given, mask_missing_routes=masked)
        found = load_file(tmp_path / "trained/step_000007.safetensors")
        second = Flag.CLIPPED_LOW | (Flag.MISSING_ROUTE if masked else 0)
        assert found["a/0:flags"].tolist() == [0, second, 0, Flag.CLIPPED_LOW]
        assert found["b/0:flags"].tolist() == [128, 128 | 2, 128, 128 | 2]
    left_out = [replace(given[0], sample=replace(given[0].sample, in_loss=False)), *given[1:]]
    write(tmp_path, left_out, mask_missing_routes=True)
    written = load_file(tmp_path / "trained/step_000007.safetensors")["a/0:flags"]
    assert written.tolist() == [128, 128 | 64 | 2, 128, 128 | 2]


def test_flags_and_kinds_are_those_of_the_documentation(tmp_path):
    """Files of other runs are read by these numbers and names."""
    assert {flag.name: int(flag) for flag in Flag} == {
        "CLIPPED_HIGH": 1, "CLIPPED_LOW": 2, "BOUNDED": 4, "WEIGHT_MASKED": 8, "REJECTED": 16,
        "NOT_FINITE": 32,
        "MISSING_ROUTE": 64, "LEFT_OUT": 128,
    }  # fmt: skip
    text = (Path(__file__).parents[3] / "docs/reference/token_data.md").read_text()
    rows = text.partition("## Kinds of the trainer's half")[2].partition("| flag |")[0].splitlines()
    documented = {
        name for row in rows if "|" in row for name in re.findall("`([a-z_]+)`", row.split("|")[1])
    }
    write(tmp_path, make_sequences(["a/0"]))
    found = load_file(tmp_path / "trained/step_000007.safetensors")
    assert {key.rpartition(":")[2] for key in found} == documented and len(documented) == 11


def test_a_step_written_again_replaces_tensors_and_lines(tmp_path):
    for step in (0, 1):
        write(tmp_path, make_sequences(["a/0"], step=step))
    lines = (tmp_path / "trained/step_000007.jsonl").read_text().splitlines()
    assert len(lines) == 1 and sorted(path.name for path in (tmp_path / "trained").iterdir()) == [
        "step_000007.jsonl",
        "step_000007.safetensors",
    ]


def test_without_compared_routes_the_other_kinds_are_there(tmp_path):
    sequence = make_sequences(["a/0"])[0]
    table = Table.zeros(0, len(sequence.sample.rollout.tokens) - 1, K, 4, np.dtype(np.uint8))
    write(tmp_path, [replace(sequence, table=table)])
    kinds = {
        key.rpartition(":")[2] for key in load_file(tmp_path / "trained/step_000007.safetensors")
    }
    assert kinds == {*Table.VALUES, "advantage"}


def test_the_documented_reader_reads_it(tmp_path, capsys, monkeypatch):
    sequences = make_sequences(["a/0", "a/1", "b/0"])
    group = RolloutGroup(
        Prompt("a", "text", (1,), ""), tuple(each.sample.rollout for each in sequences[:2])
    )
    Recorder(tmp_path / "runs/demo", save_tensors=True).record(7, [group])
    write(tmp_path / "runs/demo", sequences[:2])
    text = (Path(__file__).parents[3] / "docs/reference/token_data.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    (tmp_path / "read.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("read.py")
    gap = np.abs(
        np.arange(4, dtype=np.float32) - sequences[0].sample.rollout.rollout_logprobs
    ).max()
    assert capsys.readouterr().out == f"7 a/0 largest log-ratio {gap!s}\n"


@pytest.mark.parametrize(("layers", "top_k", "size"), [(48, 8, 511), (4, 2, 42)])
def test_bytes_per_token_are_those_of_the_documentation(tmp_path, layers, top_k, size):
    """Of a long response; the header of a file adds about 100 bytes for each array."""
    rollout = make_rollout("a/0", 1, 20_000, layers=1)
    sample = Sample(rollout, 1.0, save_tokens=True)
    table = Table.zeros(layers, 20_000, top_k, 20_000, np.dtype(np.uint8))
    write(tmp_path, [SequenceTokens(0, sample, SUMMARY, table)])
    assert (tmp_path / "trained/step_000007.safetensors").stat().st_size / 20_000 == pytest.approx(
        size, abs=0.1
    )
    text = (Path(__file__).parents[3] / "docs/reference/token_data.md").read_text()
    assert "25 for each sampled token" in text and "With 48 layers and top-8 that is 511" in text


def test_training_continues_where_the_folder_is_gone(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert write(tmp_path / "gone", make_sequences(["a/0"])) == 2
    assert caplog.text.count("could not be written") == 1 and "gone/trained" in caplog.text
