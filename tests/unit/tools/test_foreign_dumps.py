"""Dumps in the shapes of slime 624b824, miles 31f1ca9 and verl b178a3c: sound ones pass, every
fault gets its name.
"""

import json
import pickle
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from megatron_rl_tools.check_rollouts.check_rollouts import check_dump, main
from megatron_rl_tools.check_rollouts.formats import open_dump
from megatron_rl_tools.check_rollouts.model_sizes import Model, open_model
from tests.tiny import random_checkpoint

ROLLOUTS, PROMPT, RESPONSE, LAYERS, DENSE, EXPERTS, TOP_K = 8, 10, 80, 4, 1, 16, 4
TOOL = slice(30, 45)  # of the response: written by an environment


def make_sequences():
    """(tokens [S], log-probs [R], mask [R], routes int32 [S - 1, layers, K]) of every rollout.

    Each token has favourite experts, other for one row in five, as a first MoE layer has; layer 0
    is dense.
    """
    rng = np.random.default_rng(0)
    size = PROMPT + RESPONSE
    favourites = rng.random((40, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    for _ in range(ROLLOUTS):
        tokens = rng.integers(2, 40, size)
        logprobs, mask = -rng.random(RESPONSE) - 0.01, np.ones(RESPONSE, int)
        logprobs[TOOL], mask[TOOL] = 0, 0
        others = rng.random((size - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        changed = rng.random((size - 1, LAYERS)) < 0.2
        routes = np.where(changed[..., None], others, favourites[tokens[:-1]])
        routes[:, :DENSE] = 0
        yield tokens, logprobs, mask, routes.astype(np.int32)


def sample(index, tokens, logprobs, mask, routes):
    """Sample.to_dict() of slime."""
    return {
        "group_index": index // 2, "index": index, "rollout_id": None, "prompt": "question",
        "tokens": tokens.tolist(),
        "multimodal_inputs": None, "multimodal_train_inputs": None,
        "multimodal_train_input_id": None,
        "apply_chat_template_kwargs": {}, "response": "answer", "response_length": len(mask),
        "label": "7", "reward": 1.0,
        "loss_mask": mask.tolist(), "weight_versions": ["3", "4"],
        "rollout_log_probs": logprobs.tolist(),
        "rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": torch.from_numpy(routes), "remove_sample": False,
        "teacher_log_probs": None,
        "status": "completed", "metadata": {"source": "test"}, "generate_function_path": None,
        "custom_rm_path": None,
        "train_metadata": None, "session_id": None, "non_generation_time": 0.5,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0,
        "completion_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 10},
    }  # fmt: skip


def miles_sample(fields):
    """The same of miles: arrays, and fields of its own."""
    fields = dict(fields)
    for name in (
        "multimodal_train_input_id", "apply_chat_template_kwargs", "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "custom_rm_path", "session_id",
    ):  # fmt: skip
        del fields[name]
    fields["rollout_routed_experts"] = fields["rollout_routed_experts"].numpy()
    own = ("rollout_indexer_topk", "opd_reverse_kl", "adapter", "reward_spec", "routing_key")
    return fields | dict.fromkeys(own)


def save_samples(folder, trainer="slime", change=lambda samples: None, sequences=None):
    samples = [sample(index, *parts) for index, parts in enumerate(sequences or make_sequences())]
    change(samples)
    payload = {"rollout_id": 5, "samples": samples}
    if trainer == "miles":
        payload = {
            "rollout_id": 5,
            "metadata": {},
            "samples": [miles_sample(each) for each in samples],
        }
    folder.mkdir(exist_ok=True)
    torch.save(payload, folder / "5.pt")
    return folder


def save_batch(folder, change=lambda batch: None, sequences=None):
    """batch.to_dict() of a DataProto: prompts padded to 16 on the left, responses to 100 on the
    right.
    """
    rows = []
    for tokens, logprobs, mask, routes in sequences or make_sequences():
        row = {
            "prompts": np.pad(tokens[:PROMPT], (6, 0)), "responses": np.pad(tokens[PROMPT:], (0,
            20)),
            "response_mask": np.pad(mask, (0, 20)), "input_ids": np.pad(tokens, (6, 20)),
            "attention_mask": np.pad(np.ones(len(tokens), int), (6, 20)),
            "position_ids": np.pad(np.arange(len(tokens)), (6, 20)),
            "rollout_log_probs": np.pad(logprobs.astype(np.float32), (0, 20)),
            "routed_experts": np.pad(routes, ((6, 21), (0, 0), (0, 0))),
        }  # fmt: skip
        rows.append(row)
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    change(batch)
    folder.mkdir(exist_ok=True)
    torch.save(batch, folder / "5.pt")
    return folder


def report_of(path, capsys, *arguments):
    status = main([str(path), "--json", *arguments])
    captured = capsys.readouterr()
    assert status < 2, captured.err
    report = json.loads(captured.out)
    assert report["passed"] == (status == 0)
    return report


def error_of(path, capsys, *arguments):
    assert main([str(path), *arguments]) == 2
    return capsys.readouterr().err


SAVE = {
    "slime": save_samples,
    "miles": lambda folder, **settings: save_samples(folder, "miles", **settings),
    "verl": save_batch,
}


@pytest.mark.parametrize("trainer", SAVE)
def test_a_sound_dump_passes_and_says_what_was_not_checked(trainer, tmp_path, capsys):
    folder = SAVE[trainer](tmp_path / "dump")
    for arguments in ((), ("--format", trainer)):
        report = report_of(folder, capsys, *arguments)
        assert report["passed"], report["findings"]
        assert (report["format"], report["rollouts"], report["with_routes"]) == (
            trainer,
            ROLLOUTS,
            ROLLOUTS,
        )
        unchecked = {"digest", "episode", "turns", "mask"} | (
            {"versions"} if trainer == "verl" else set()
        )
        assert set(report["unchecked"]) == unchecked
        assert "the first 1 layers are 0 in every rollout and taken as dense" in report["notes"][0]
    assert main([str(folder / "5.pt")]) == 0
    shown = capsys.readouterr().out
    assert f"{ROLLOUTS} rollouts of {trainer}, {ROLLOUTS} with expert ids" in shown
    assert re.search(r"digest +NOT CHECKED", shown) and re.search(r"loss_mask +PASS", shown)


def every(field, change):
    def apply(samples):
        for each in samples:
            each[field] = change(each[field])

    return apply


def one(field, change):
    return lambda samples: every(field, change)(samples[:1])


def zero_layer(routes):
    routes[:, 2] = 0
    return routes


def zero_dense(routes):
    routes[:, 1] = 0
    return routes


FAULTS = {  # name: (change of slime's samples, the only check that must fail, its message)
    "routes one late": (
        every("rollout_routed_experts", lambda r: r.roll(1, 0)),
        "alignment",
        "best at shift -1 .*token j - 1",
    ),
    "routes one early": (
        every("rollout_routed_experts", lambda r: r.roll(-1, 0)),
        "alignment",
        r"best at shift \+1 .*token j \+ 1",
    ),
    "first row lost": (
        one("rollout_routed_experts", lambda r: r[1:]),
        "length",
        "88 rows .*the first or the last row",
    ),
    "layer lost": (
        one("rollout_routed_experts", zero_layer),
        "zero",
        r"MoE layers \[1\] are all zero",
    ),
    "first MoE layer lost in one": (
        one("rollout_routed_experts", zero_dense),
        "zero",
        r"MoE layers \[0\] are all zero",
    ),
    "mask one late": (
        every("loss_mask", lambda m: [1, *m[:-1]]),
        "loss_mask",
        "112 have log-prob 0, 120 at shift -1.*j - 1",
    ),
    "mask one early": (
        every("loss_mask", lambda m: [*m[1:], 1]),
        "loss_mask",
        r"120 at shift \+1.*token j \+ 1",
    ),
    "mask of another": (
        one("loss_mask", lambda m: [1] * 60 + [0] * 10 + [1] * 10),
        "loss_mask",
        "10 masked-out tokens have a log-prob, first response token 60.*of another rollout",
    ),
    "mask of all tokens": (
        one("loss_mask", lambda m: [0] * PROMPT + m),
        "loss_mask",
        "90 entries for 80.*prompt's part",
    ),
    "weights as mask": (
        one("loss_mask", lambda m: [0.5 * x for x in m]),
        "loss_mask",
        "entry 0 is 0.5, must be 0 or 1",
    ),
    "log-probs cut": (
        one("rollout_log_probs", lambda p: p[:-1]),
        "length",
        "79 log-probs for 80 response tokens",
    ),
    "NaN": (
        one("rollout_log_probs", lambda p: [float("nan"), *p[1:]]),
        "logprobs",
        "token 0 is nan",
    ),
    "token cut": (
        one("tokens", lambda t: t[:-1]),
        "length",
        "89 rows of expert ids, must be tokens - 1 = 88",
    ),
    "parts swapped": (
        one("weight_versions", lambda v: v[::-1]),
        "versions",
        r"\[4, 3\], must not decrease",
    ),
    "no tokens": (
        lambda samples: samples[0].pop("tokens"),
        "files",
        r"the sample has no \['tokens'\]",
    ),
}


@pytest.mark.parametrize("trainer", ["slime", "miles"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_samples_is_named(trainer, fault, tmp_path, capsys):
    change, check, message = FAULTS[fault]
    findings = report_of(save_samples(tmp_path / "dump", trainer, change), capsys)["findings"]
    assert {finding["check"] for finding in findings} == {check}, findings
    assert any(re.search(message, f"{each['found']}; {each['cause']}") for each in findings), (
        findings
    )


def assign(name, place, value):
    def change(batch):
        batch[name][place] = value

    return change


def roll(name, by):
    def change(batch):
        batch[name] = batch[name].roll(by, 1)

    return change


BATCH_FAULTS = {
    "routes one late": (roll("routed_experts", 1), {"alignment", "zero"}, "best at shift -1"),
    "routes on padding": (
        roll("routed_experts", -1),
        {"alignment", "shape", "zero"},
        "rows of expert ids lie on padding",
    ),
    "mask on padding": (
        assign("response_mask", np.s_[0, 90], 1),
        {"loss_mask"},
        "1 entries on padding are not 0",
    ),
    "hole": (assign("attention_mask", np.s_[0, 50], 0), {"length"}, "attention_mask has a hole"),
    "joined": (
        assign("responses", np.s_[0, 3], 39),
        {"files"},
        "input_ids are not prompts followed by responses",
    ),
}


@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_a_fault_in_a_batch_is_named(fault, tmp_path, capsys):
    change, checks, message = BATCH_FAULTS[fault]
    findings = report_of(save_batch(tmp_path / "dump", change), capsys)["findings"]
    assert {finding["check"] for finding in findings} == checks, findings
    assert any(message in each["found"] for each in findings), findings


def test_tokens_masked_on_purpose_are_no_error(tmp_path, capsys):
    """A trainer may leave out sampled tokens: nothing is wrong where no masked-out token has
    log-prob 0.
    """

    def change(samples):
        every("loss_mask", lambda _: [0] * 20 + [1] * 60)(samples)
        every("rollout_log_probs", lambda p: [value or -1.0 for value in p])(samples)

    report = report_of(save_samples(tmp_path / "dump", change=change), capsys)
    assert report["passed"] and any(
        "0 of 160 masked-out tokens" in note for note in report["notes"]
    )


def test_what_the_content_does_not_allow_is_said(tmp_path, capsys):
    def bare(samples):
        for name in ("loss_mask", "rollout_log_probs", "rollout_routed_experts"):
            every(name, lambda _: None)(samples)
        every("weight_versions", lambda _: ["default"])(samples)

    report = report_of(save_samples(tmp_path / "dump", change=bare), capsys)
    assert report["passed"] and report["with_routes"] == 0
    left = {"files", "length"}
    assert {"logprobs", "loss_mask", "alignment", "versions", "shape"} <= set(report["unchecked"])
    assert left.isdisjoint(report["unchecked"])
    assert report["unchecked"]["alignment"] == "the dump has no expert ids"


def test_rows_of_images_are_not_taken_for_tokens(tmp_path, capsys):
    def change(samples):
        samples[0]["multimodal_train_inputs"] = {"mm_vision_num_patches": [4]}
        samples[0]["rollout_routed_experts"] = samples[0]["rollout_routed_experts"].repeat(2, 1, 1)

    report = report_of(save_samples(tmp_path / "dump", "miles", change), capsys)
    assert report["passed"] and report["with_routes"] == ROLLOUTS - 1
    assert "1 rollouts have images or sound" in report["notes"][0]


def test_evaluations_are_left_out_and_steps_chosen(tmp_path, capsys):
    folder = save_samples(tmp_path / "dump")
    (folder / "eval_5.pt").write_bytes((folder / "5.pt").read_bytes())
    report = report_of(folder, capsys, "--step", "5")
    assert (
        report["rollouts"] == ROLLOUTS and "1 evaluation files are not read" in report["notes"][0]
    )
    assert "no rollouts of step 6" in error_of(folder, capsys, "--step", "6")


def test_the_model_says_which_layers_are_dense(tmp_path, capsys):
    """With --model an MoE layer that is 0 everywhere is an error.

    (The canary then has nothing that fits the model.)
    """
    sizes = dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS)
    model = random_checkpoint(tmp_path / "model", **sizes)
    sizes = open_model(model, "float32").sizes
    dump = open_dump(save_samples(tmp_path / "dump"), None, sizes)
    findings = check_dump(dump, Model(sizes)).findings
    assert {(each.check, each.found) for each in findings} == {
        ("zero", "MoE layers [0] are all zero")
    }


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_in_a_file_is_run(tmp_path, capsys):
    witness = tmp_path / "run"
    hostile = save_samples(
        tmp_path / "hostile", change=one("metadata", lambda _: {"x": Payload(witness)})
    )
    error = error_of(hostile, capsys)
    assert "5.pt: holds objects of" in error and "io.open" in error and "never run" in error
    proto = tmp_path / "verl_GBS4__N2"
    proto.write_bytes(pickle.dumps(OrderedDict(name="verl.protocol", value=Payload(witness))))
    error = error_of(proto, capsys)
    assert "a pickled DataProto of verl" in error and "torch.save(data.batch.to_dict()" in error
    assert not witness.exists()


def test_damaged_and_other_files_are_named(tmp_path, capsys):
    folder = save_samples(tmp_path / "dump")
    whole = (folder / "5.pt").read_bytes()
    assert "its content is of slime, not verl" in error_of(folder, capsys, "--format", "verl")
    (folder / "5.pt").write_bytes(whole[:-2000])
    assert "5.pt: truncated or damaged" in error_of(folder, capsys)
    torch.save({"model": 1}, folder / "5.pt")
    assert "5.pt: not a rollout dump of slime, miles or verl" in error_of(folder, capsys)
    assert "no such file or folder" in error_of(tmp_path / "none", capsys)


WRONG = {
    "tokens": (None, "hello", [[1], [1, 2]], 5),
    "response_length": (None, "4x", [4]),
    "rollout_log_probs": ("none", [None, 0.0], [[0.0]], torch.zeros(4).to_sparse()),
    "loss_mask": ({"a": 1}, 1),
    "rollout_routed_experts": ("ids",),
    "weight_versions": (3,),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_sample_with_other_content_is_named(name, value, tmp_path, capsys):
    folder = save_samples(tmp_path, change=lambda samples: samples[2].update({name: value}))
    message = error_of(folder, capsys)
    assert f"5.pt, sample 2: {name}" in message and "must be" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_log_probs_are_read_as_a_trainer_keeps_them(dtype, tmp_path, capsys):
    """In any dtype, and with a gradient; other tensors of a batch are not read."""

    def kept(values):
        return torch.as_tensor(values, dtype=dtype).requires_grad_()

    def in_samples(samples):
        for fields in samples:
            fields["rollout_log_probs"] = kept(fields["rollout_log_probs"])

    def in_batch(batch):
        batch["rollout_log_probs"] = kept(batch["rollout_log_probs"])
        batch["old_log_probs"] = torch.zeros(2, 3).to_sparse()

    for folder in (
        save_samples(tmp_path / "slime", change=in_samples),
        save_batch(tmp_path / "verl", change=in_batch),
    ):
        report = report_of(folder, capsys)
        assert report["passed"] and "logprobs" not in report["unchecked"], report


def test_a_batch_of_other_shapes_is_named(tmp_path, capsys):
    folder = save_batch(tmp_path, change=lambda batch: batch.update(prompts=torch.zeros(8)))
    assert "5.pt: prompts is [8], must have two dimensions" in error_of(folder, capsys)


def test_text_of_verl_ends_at_the_end_of_its_line(tmp_path, capsys):
    """JSON need not escape other characters that separate lines."""
    rows = [
        {"input": "q", "output": text, "gts": "7", "score": 1.0, "step": 5}
        for text in ("plain", "a\u2028b", "c\u0085d", "e\x1cf")
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "5.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    report = report_of(tmp_path, capsys)
    assert report["passed"] and report["rollouts"] == 4, report["findings"]


def test_text_of_verl_is_read_for_what_it_holds(tmp_path, capsys):
    """_dump_generations: text without tokens."""
    line = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 5, "acc": 1.0}
    file = tmp_path / "5.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (line, line)))
    report = report_of(tmp_path, capsys)
    assert report["passed"] and (report["format"], report["rollouts"]) == ("verl", 2)
    assert set(report["unchecked"]) == set(report["checks"]) - {"files"}
    assert report["unchecked"]["alignment"] == "the files hold text only, no token ids"
    wrong = [{**line, "score": float("nan")}, {**line, "step": 4}, {"input": ""}]
    file.write_text("".join(json.dumps(each) + "\n" for each in (line, *wrong)) + '{"cut')
    found = [each["found"] for each in report_of(file, capsys)["findings"]]
    assert len(found) == 4
    for text, message in zip(
        found, ("score is nan", "step 4 in 5.jsonl", "the line has no", "not JSON"), strict=True
    ):
        assert message in text
