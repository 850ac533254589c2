"""Every fault put into a genuine dump gets its own name; the genuine dump gets none.

The dump holds what real megatron-core routers chose: the engine records their routes on random
sequences.
"""

import io
import json
import re
import shutil

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from megatron_rl.records import routes_digest
from megatron_rl_tools.check_rollouts.check_rollouts import CheckReport, check_run, main, show
from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding, RecordedRollout
from megatron_rl_tools.check_rollouts.model_sizes import open_model
from megatron_rl_tools.check_rollouts.rollout_checks import Across, check_one
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

PROMPTS, GROUP, PROMPT_TOKENS, TOKENS, EXPERTS, TOP_K, LAYERS = 3, 3, 10, 90, 16, 4, 4
SIDE = "rollouts/step_000000.safetensors"


def make_dump(checkpoint, folder):
    """On a rank: two steps of rollouts with the log-probs and routes that the engine finds for
    them.
    """
    from dataclasses import replace

    import torch.distributed as dist

    from megatron_rl.batch.pack import Sample
    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.records import Prompt, Rollout, RolloutGroup
    from megatron_rl.rollout.saved.rollout_recorder import Recorder
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    engine = make_engine(checkpoint, replay="R2")
    # there are no routes to compare with yet
    object.__setattr__(engine.cfg.replay, "measure", False)
    rng = np.random.default_rng(0)
    for step in (0, 1):
        groups = []
        for number in range(PROMPTS):
            prompt = rng.integers(2, 40, PROMPT_TOKENS)
            rollouts = []
            for k in range(GROUP):
                tokens = np.concatenate([prompt, rng.integers(2, 40, TOKENS - PROMPT_TOKENS)])
                logprobs = np.zeros(TOKENS - PROMPT_TOKENS, np.float32)
                versions = np.full(len(logprobs), step, np.int32)
                rollouts.append(
                    Rollout(
                        f"{number}/{k}", tokens, PROMPT_TOKENS, logprobs, None, "stop", versions
                    )
                )
            groups.append(
                RolloutGroup(Prompt(str(number), "text", tuple(prompt), "label"), tuple(rollouts))
            )
        samples = [Sample(rollout, 0.0) for group in groups for rollout in group.rollouts]
        batch = make_mini_batch(samples, max_tokens=200, rule=engine.pack_rule, dp_group=None)
        old = engine.old_logprobs(batch, MetricSums(), replay="R2")
        found = {}
        for micro, ids, values in zip(batch.micro_batches, old.recorded, old.logprobs, strict=True):
            for index, name in enumerate(micro.rollout_ids):
                rows = (micro.sequence_ids == index).nonzero().squeeze(1)
                found[name] = (
                    ids[:, rows[:-1]].transpose(0, 1).numpy(),
                    values[rows[PROMPT_TOKENS - 1 : -1]].numpy(),
                )
        groups = [
            replace(
                group,
                rollouts=tuple(
                    replace(r, routed_experts=found[r.id][0], rollout_logprobs=found[r.id][1])
                    for r in group.rollouts
                ),
            )
            for group in groups
        ]
        Recorder(folder, save_tensors=True).record(step, groups)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = dict(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
        moe_intermediate_size=16,
    )
    return random_checkpoint(tmp_path_factory.mktemp("model") / "moe", **sizes)


@pytest.fixture(scope="module")
def genuine(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump") / "run"
    run_ranks(make_dump, 1, checkpoint, folder)
    return folder


def change_routes(folder, change, names=("0/0",), *, sealed=True):
    """Write change(routes, all tensors) in place of the expert ids of these rollouts of step 0.

    sealed: with the digest of what is written, as if the server had sent it so.
    """
    tensors = load_file(folder / SIDE)
    before = dict(tensors)
    for name in names:
        routes = np.ascontiguousarray(change(before[f"{name}:routed_experts"], before))
        tensors[f"{name}:routed_experts"] = routes
        if sealed:
            tensors[f"{name}:routes_digest"] = np.frombuffer(
                routes_digest(tensors[f"{name}:tokens"], routes), np.uint8
            )
    save_file(tensors, folder / SIDE)


def put(where, value):
    def change(routes, _):
        routes = routes.astype(np.int16)
        routes[where] = value
        return routes

    return change


EVERY = tuple(f"{number}/{k}" for number in range(PROMPTS) for k in range(GROUP))
FAULTS = {  # name: (change, rollouts, the only check that must fail, its message)
    "first row lost": (
        lambda r, _: r[1:],
        ("0/0",),
        "length",
        "88 rows .* tokens - 1 = 89.*first or the last row",
    ),
    "row of the last token": (
        lambda r, _: r[[*range(89), 88]],
        ("0/0",),
        "length",
        "90 rows.*never an input",
    ),
    "response only": (
        lambda r, _: r[10:],
        ("0/0",),
        "length",
        "79 rows.*prompt's rows are missing",
    ),
    "cut": (lambda r, _: r[:20], ("0/0",), "length", "20 rows.*truncated"),
    "zero layer": (put(np.s_[:, 2], 0), ("0/0",), "zero", r"MoE layers \[2\] are all zero"),
    "zero tail": (put(np.s_[30:], 0), ("0/0",), "zero", "rows 30 to the end.*routes end before"),
    "zero row": (put(np.s_[7], 0), ("0/0",), "zero", "all-zero rows, first row 7"),
    "duplicate": (
        put(np.s_[3, 1], (5, 5, 1, 2)),
        ("0/0",),
        "duplicate",
        r"1 rows.*row 3, MoE layer 1: \[5, 5, 1, 2\]",
    ),
    "all ids equal": (put(np.s_[:], 9), ("0/0",), "duplicate", r"356 rows.*\[9, 9, 9, 9\]"),
    "wrapped": (put(np.s_[3, 1, 2], -56), ("0/0",), "dtype", "row 3, MoE layer 1: -56.*wrapped"),
    "float": (lambda r, _: r.astype(np.float32), ("0/0",), "shape", "float32.*must be integers"),
    "other shape": (lambda r, _: r[:, :2], ("0/0",), "shape", "differ.*two models"),
    "one row for all": (
        lambda r, _: r[np.full(89, 4)],
        ("0/0",),
        "stuck",
        "rows 0 to 88 are one row",
    ),
    "stuck": (
        lambda r, _: r[np.minimum(np.arange(89), 20)],
        ("0/0",),
        "stuck",
        "rows 20 to 88 are one row",
    ),
    "copied": (
        lambda r, t: t["2/2:routed_experts"],
        ("0/0",),
        "copied",
        "equal those of step 0.*another request",
    ),
    "all one late": (
        lambda r, _: np.roll(r, 1, 0),
        EVERY,
        "alignment",
        "best at shift -1.*experts of token j - 1",
    ),
    "all one early": (
        lambda r, _: np.roll(r, -1, 0),
        EVERY,
        "alignment",
        r"best at shift \+1.*experts of token j \+ 1",
    ),
}


def test_a_genuine_dump_passes_without_a_model(genuine, capsys):
    report = check_run(genuine, None)
    assert report.passed, report.findings
    assert (report.rollouts, report.with_routes) == (18, 18)
    assert main([str(genuine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_without_a_model(genuine, tmp_path, fault, capsys):
    change, names, check, message = FAULTS[fault]
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    change_routes(folder, change, names)
    # the other step is in order and would outweigh a shift of this one
    step = 0 if len(names) > 1 else None
    findings = check_run(folder, None, step=step).findings
    found = [f"{f.found}; {f.cause}" for f in findings if f.check == check]
    assert any(re.search(message, text) for text in found), findings
    assert {f.check for f in findings} == {check}
    assert main([str(folder), *(["--step", "0"] if step == 0 else [])]) == 1
    assert check in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["all one late", "copied", "stuck"])
def test_changes_after_sampling_break_the_digest(genuine, tmp_path, fault):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    change_routes(folder, FAULTS[fault][0], ("0/0",), sealed=False)
    findings = [
        finding for finding in check_run(folder, None).findings if finding.check == "digest"
    ]
    assert [finding.where for finding in findings] == ["step 0 0/0"]


def test_an_edited_token_and_a_lost_digest_are_named(genuine, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    tensors = load_file(folder / SIDE)
    tensors["1/0:tokens"][40] += 1
    del tensors["2/1:routes_digest"]
    save_file(tensors, folder / SIDE)
    findings = check_run(folder, None).findings
    assert [(finding.check, finding.where) for finding in findings] == [
        ("digest", "step 0 1/0"),
        ("digest", "step 0 2/1"),
    ]
    assert (
        "edited or truncated after sampling" in findings[0].cause
        and "none recorded" in findings[1].found
    )


def test_rows_recorded_as_missing_are_counted_and_no_error(genuine, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    gaps = [5, 30, 31, 32, 33, 34, 88]
    change_routes(folder, put(np.s_[gaps], 0))
    assert {finding.check for finding in check_run(folder, None).findings} == {"zero"}, (
        "not declared"
    )
    tensors = load_file(folder / SIDE)
    missing = np.zeros(TOKENS - 1, bool)
    missing[gaps] = True
    save_file(tensors | {"0/0:missing_routes": missing}, folder / SIDE)
    report = check_run(folder, None)
    assert report.passed and report.missing_rows == 7
    assert (
        main([str(folder)]) == 0 and "7 rows recorded as without a route" in capsys.readouterr().out
    )
    save_file(tensors | {"0/0:missing_routes": missing[1:]}, folder / SIDE)
    assert {finding.check for finding in check_run(folder, None).findings} == {"zero", "shape"}


def edit_records(folder, step, **changes):
    path = folder / f"rollouts/step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(row for row in rows if row["step"] == step)
    first.update(changes)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("step", "changes", "check", "message"),
    [
        (
            1,
            {"policy_versions": [[0, 80]]},
            "versions",
            "mixed weight versions .version 0: 1, version 1: 8",
        ),
        (
            1,
            {"policy_versions": [[0, 30], [1, 50]]},
            "versions",
            "mixed weight versions .version 0: 1, version 1: 9",
        ),
        (0, {"policy_versions": [[7, 80]]}, "versions", "version 1 after version 7"),
        (0, {"response_length": 81}, "length", "90 tokens, must be prompt . response = 10 . 81"),
        (0, {"id": "unknown"}, "files", "step_000000.safetensors has no"),
    ],
)
def test_records_that_do_not_match_their_tensors_are_named(
    genuine, tmp_path, step, changes, check, message
):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    edit_records(folder, step, **changes)
    findings = check_run(folder, None).findings
    assert any(f.check == check and re.search(message, f.found) for f in findings), findings
    assert {f.check for f in findings} == {check}


def test_damaged_files_are_named(genuine, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    (folder / SIDE).write_bytes((folder / SIDE).read_bytes()[:-100])
    assert {f.check for f in check_run(folder, None).findings} == {"files"}
    (folder / SIDE).unlink()
    assert ["is missing" in f.found for f in check_run(folder, None).findings] == [True]
    (folder / "rollouts/step_000001.safetensors").unlink()
    assert main([str(folder)]) == 2
    assert "save_tensors" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2


def test_bad_logprobs_are_named(genuine, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(genuine, folder)
    tensors = load_file(folder / SIDE)
    tensors["0/0:logprobs"][3] = np.nan
    save_file(tensors, folder / SIDE)
    (finding,) = check_run(folder, None).findings
    assert (finding.check, "response token 3 is nan" in finding.found) == ("logprobs", True)


def dumped_with(routes, tokens):
    record = RecordedRollout(
        0, "x", "p", "", "", "", 0.0, 0.0, 1, len(tokens) - 1, "stop", [[0, len(tokens) - 1]]
    )
    return Dumped(record, tokens, np.zeros(len(tokens) - 1, np.float32), routes)


@pytest.mark.parametrize(
    ("experts", "change", "message"),
    [
        (16, lambda r: r + 16, "range: .*ids outside.*0 <= id < 16"),
        (16, lambda r: r.transpose(0, 2, 1), "shape: .*axes are swapped"),
        (16, lambda r: r.reshape(len(r), 1, 6), "shape: .*another number of layers and top-k"),
        (16, lambda r: r[:, [0, 1, 1]], "shape: .*dense layers"),
        (512, lambda r: r, "dtype: uint8 cannot hold ids of 512 experts"),
        (512, lambda r: r.astype(np.int16), "dtype: no id above 255 among .*8-bit"),
    ],
)
def test_a_model_that_does_not_match_the_ids_is_named(tmp_path, experts, change, message):
    config = random_checkpoint(
        tmp_path,
        num_experts=experts,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        mlp_only_layers=[0],
    )
    sizes = open_model(config, "float32").sizes
    rng = np.random.default_rng(0)
    routes = np.argsort(rng.random((300, 2, 16)), axis=-1)[..., :3].astype(np.uint8)
    item = dumped_with(change(routes), rng.integers(2, 60, 301))
    across = Across(sizes)
    across.add(item)
    found = [
        f"{f.check}: {f.found}; {f.cause}" for f in [*check_one(item, sizes), *across.findings()]
    ]
    assert any(re.search(message, text) for text in found), found


def swap_layers(a, b):
    order = list(range(LAYERS))
    order[a], order[b] = b, a
    return lambda r, _: r[:, order]


CANARY_FAULTS = {
    "genuine": (lambda r, _: r, ("0/0",), None),
    "one rollout late": (
        lambda r, _: np.roll(r, 1, 0),
        ("1/1",),
        "row j has the experts of token j - 1",
    ),
    "one rollout early": (
        lambda r, _: np.roll(r, -1, 0),
        ("1/1",),
        r"row j has the experts of token j \+ 1",
    ),
    "layers swapped": (
        swap_layers(1, 2),
        EVERY,
        "exchanged: MoE layer 1 has those of 2; 2 has those of 1",
    ),
    "layers reversed": (lambda r, _: r[:, ::-1], EVERY, "layers reversed"),
    "another request": (
        lambda r, t: t["2/2:routed_experts"],
        ("1/1",),
        "these are the routes of step 0 2/2",
    ),
    "same prompt, another answer": (
        lambda r, t: t["1/2:routed_experts"],
        ("1/1",),
        "the routes of step 0 1/2",
    ),
    "random": (
        lambda r, _: np.argsort(np.random.default_rng(0).random((*r.shape[:2], EXPERTS)), -1)[
            ..., :TOP_K
        ],
        ("0/1",),
        "other weights than --model",
    ),
    "after missing rows": (
        lambda r, _: np.concatenate([r[:50], r[55:], r[50:55]]),
        ("0/1",),
        "rows 50 to 88 .* correct up to there",
    ),
}


def canary_findings(folders, checkpoint):
    """On a rank: findings of the canary for every folder, and its agreement."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = open_model(checkpoint, "float32")
    results = {}
    for name, folder in folders.items():
        report = check_run(folder, model, sample=9)
        found = [(f.where, f"{f.found}; {f.cause}") for f in report.findings if f.check == "canary"]
        results[name] = found, report.canary
    status = main([str(folders["genuine"]), "--model", str(checkpoint), "--step", "1"])
    dist.destroy_process_group()
    return results, status


def test_the_canary_finds_routes_that_are_wrong_but_valid(genuine, checkpoint, tmp_path):
    folders = {}
    for number, (name, (change, names, _)) in enumerate(CANARY_FAULTS.items()):
        folders[name] = tmp_path / str(number)
        shutil.copytree(genuine, folders[name])
        change_routes(folders[name], change, names)
    ((results, status),) = run_ranks(canary_findings, 1, folders, checkpoint)
    assert status == 0
    found, agreement = results.pop("genuine")
    assert not found
    assert agreement["0"] > 0.99 > 0.7 > max(agreement["-1"], agreement["+1"])
    for name, (found, _) in results.items():
        _, names, message = CANARY_FAULTS[name]
        assert found and all(re.search(message, text) for _, text in found), (name, found)
        if len(names) == 1:
            assert [where for where, _ in found] == [f"step 0 {names[0]}"], (name, found)


def test_a_row_that_a_small_model_repeats_by_chance_is_no_error():
    """Two layers that choose the same pair nearly always repeat whole rows; 24 layers do not."""
    rng = np.random.default_rng(0)

    def findings(layers: int) -> list[str]:
        tokens = rng.integers(10, 60, 41)
        routes = np.where(rng.random((40, layers, 1)) < 0.8, [1, 5], [2, 7]).astype(np.uint8)
        routes[20:25] = routes[20]
        record = RecordedRollout(0, "0/0", "0", "", "", "", 0.0, 0.0, 1, 40, "stop", [[0, 40]])
        dumped = Dumped(record, tokens, np.zeros(40, np.float32), routes)
        return [finding.check for finding in check_one(dumped, None) if finding.check == "stuck"]

    assert findings(layers=2) == [] and findings(layers=24) == ["stuck"]


def test_similar_neighbouring_rows_are_no_error():
    """A small random model's own routes (the trainer's, too), as an end-to-end run had them: layers
    choose the same for long.
    """
    first = [
        *["02"] * 2,
        *["23"] * 2,
        "27",
        "12",
        *["24"] * 6,
        "12",
        "23",
        "24",
        "26",
        "24",
        "26",
        "47",
        "47",
        "02",
        "46",
    ]
    third = ["56"] * 6 + ["26"] * 8 + ["16"] + ["26"] * 3 + ["16"] * 3 + ["26"]
    routes = np.array(
        [
            [list(map(int, pair)) for pair in (a, "26", c)]
            for a, c in zip(first, third, strict=True)
        ],
        np.uint8,
    )
    record = RecordedRollout(0, "0/0", "0", "", "", "", 0.0, 0.0, 1, 22, "stop", [[0, 22]])
    dumped = Dumped(record, np.arange(23), np.zeros(22, np.float32), routes)
    assert [finding.check for finding in check_one(dumped, None) if finding.check == "stuck"] == []


def test_what_is_found_is_shown_as_it_is():
    finding = Finding("routes", "q[/b]/0", "[layers, top-k] differ: [2, 8]", "must be [2, 4]")
    report = CheckReport(
        1, 1, 0, ("routes", "masks"), (finding,), None, unchecked={"masks": "no [mask]"},
        notes=("a note [of] it",),
    )  # fmt: skip
    console = Console(width=200, file=io.StringIO())
    show(report, console)
    text = console.file.getvalue()
    for part in (f"{finding.where}: {finding.found}", finding.cause, "no [mask]", "a note [of] it"):
        assert part in text
