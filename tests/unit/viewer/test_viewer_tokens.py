"""One rollout: every number stands at its token, every token shows its bytes; experts of both
engines.
"""

import base64
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_rl_viewer import expert_loads, token_data
from megatron_rl_viewer.pieces import Pieces, shown_tokens
from megatron_rl_viewer.run_folder import Runs
from tests.viewer_run import EXPERTS, GROUP, LAYERS, PROMPTS, TOP_K, VOCABULARY, write_run

PER_TOKEN = {
    "log_mu": ("server", "logprobs"), "log_pi_old": ("trainer", "old_logprobs"),
    "log_pi": ("trainer", "logprobs"),
    "ratio": ("trainer", "ratio"), "weight": ("trainer", "weight"), "entropy": ("trainer",
    "entropy"),
    "loss": ("trainer", "loss"), "rank": ("trainer", "rank"), "flags": ("trainer", "flags"),
}  # fmt: skip


def unpack(part):
    data = np.frombuffer(base64.b64decode(part["data"]), np.dtype(part["dtype"]).newbyteorder("<"))
    return data.reshape(part["shape"])


@pytest.fixture
def tensors(run_dir):
    """tensors(STEP, FILE, ID): {"server": {kind: array}, "trainer": {kind: array}} as the run wrote
    them.
    """

    def of(step, file, name):
        halves = {"server": file, "trainer": file.replace("rollouts", "trained")}
        return {
            half: {
                kind.rpartition(":")[2]: array
                for kind, array in load_file(run_dir / f"{stem}_{step:06d}.safetensors").items()
                if kind.startswith(f"{name}:")
            }
            for half, stem in halves.items()
        }

    return of


@pytest.mark.parametrize("prompt", range(PROMPTS))
@pytest.mark.parametrize("k", range(GROUP))
def test_every_value_stands_at_its_token(client, tensors, prompt, k):
    """Each value of a token is unique: at another one it would not be equal.

    k = 1 has tokens of an environment.
    """
    file = "rollouts.dp1" if prompt % 2 else "rollouts"
    rollout = client.get(f"/api/runs/0/rollout/4/{file}/Q{prompt}%2F{k}").json()
    halves = tensors(4, file, f"Q{prompt}/{k}")
    assert rollout["missing"] == []
    tokens, values = rollout["tokens"], rollout["values"]
    ids = halves["server"]["tokens"].tolist()
    assert [token["id"] for token in tokens] == ids and [
        token["place"] for token in tokens
    ] == list(range(len(ids)))
    assert [token["text"] for token in tokens] == [VOCABULARY[token] for token in ids]
    prompt_length = rollout["meta"]["prompt_length"]
    spans = ["prompt"] * prompt_length + ["model"] * (len(ids) - prompt_length)
    for start, end in halves["server"].get("environment", np.zeros((0, 2), int)).tolist():
        spans[start:end] = ["environment"] * (end - start)
    assert [token["span"] for token in tokens] == spans and ("environment" in spans) is (k == 1)
    sampled = [place for place, span in enumerate(spans) if span == "model"]
    for name, (half, kind) in PER_TOKEN.items():
        expected = dict(zip(sampled, np.atleast_2d(halves[half][kind])[-1].tolist(), strict=True))
        assert values[name] == [expected.get(place) for place in range(len(ids))], name
    for place in range(len(ids)):
        old, mu = values["log_pi_old"][place], values["log_mu"][place]
        assert values["log_ratio"][place] == (
            None if mu is None else pytest.approx(old - mu, abs=1e-6)
        )
        # the made-up flags are 0 and 1 = clipped high
        assert values["clipped"][place] == values["flags"][place]
        assert values["advantage"][place] == (
            rollout["meta"]["advantage"] if place in sampled else None
        )
    versions = [
        version for version, count in rollout["meta"]["policy_versions"] for _ in range(count)
    ]
    assert [values["version"][place] for place in sampled] == versions


def test_flips_stand_at_the_token_that_the_row_predicted(client, tensors):
    """Row j is the forward that read token j: its flips are those of token j + 1, its experts those
    of both engines.
    """
    rollout = client.get("/api/runs/0/rollout/2/rollouts/Q2%2F1").json()
    halves, routes = tensors(2, "rollouts", "Q2/1"), rollout["routes"]
    server, own = halves["server"]["routed_experts"], halves["trainer"]["own_experts"]
    assert (routes["layers"], routes["top_k"]) == (LAYERS, TOP_K)
    assert (unpack(routes["server"]) == server).all() and (unpack(routes["trainer"]) == own).all()
    assert (unpack(routes["margin"]) == halves["trainer"]["margin"].astype(np.float32)).all()
    differs = np.array(
        [
            [set(a) != set(b) for a, b in zip(*rows, strict=True)]
            for rows in zip(server, own, strict=True)
        ]
    )
    bits = np.unpackbits(unpack(routes["flips"]), axis=1, bitorder="little")[:, :LAYERS]
    assert (bits == differs).all() and differs.any()
    assert rollout["values"]["flips"] == [None, *differs.sum(1).tolist()]


def test_siblings_are_those_of_the_prompt_and_step(client):
    rollout = client.get("/api/runs/0/rollout/3/rollouts.dp1/Q1%2F2").json()
    assert [each["key"] for each in rollout["group"]] == [
        f"3/rollouts.dp1/Q1%2F{k}" for k in range(GROUP)
    ]
    assert (
        rollout["key"] == rollout["group"][2]["key"] and rollout["meta"]["trained"]["id"] == "Q1/2"
    )
    again = client.get("/api/runs/0/rollout/3%2Frollouts.dp1%2FQ1%252F2").json()
    assert again == rollout


def test_the_flags_of_a_token():
    flags = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 1 | 4, 2 | 64], np.uint8)
    assert token_data.clipped(flags).tolist() == [0, 1, 2, 0, 3, 3, 3, 3, 3, 1, 2]


# What is missing is named -------------------------------------------------------------------------


def damage(folder, name, change):
    arrays = load_file(folder / name)
    change(arrays)
    save_file(arrays, folder / name, metadata={"schema": "1"})


NOT_SAVED = "this run did not save the tokens of this response (rollout.save_tensors = {})"


def leave_out(folder, name, *, share):
    """As a run leaves a response out of its files of tensors."""
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("save_tensors = false", f"save_tensors = {share}"))
    for stem in ("rollouts", "trained"):
        drop = lambda arrays: [arrays.pop(key) for key in [*arrays] if key.startswith(f"{name}:")]  # noqa: E731
        damage(folder, f"{stem}_000001.safetensors", drop)
    lines = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    lines = [
        {**line, "tensors": None, "key": None} if line["id"] == name else line for line in lines
    ]
    (folder / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def of_run(open_runs, folder, key="1/rollouts/Q0%2F0"):
    return token_data.rollout(open_runs(folder).runs[0], key)


def test_without_tensors_the_text_is_shown(tmp_path, open_runs):
    rollout = of_run(
        open_runs, write_run(tmp_path / "run", steps=1, tokenizer=False, tensors=False)
    )
    assert (
        rollout["tokens"] == []
        and rollout["routes"] is None
        and rollout["meta"]["response"].startswith("<script>")
    )
    assert rollout["missing"] == [] and rollout["notes"] == [NOT_SAVED.format("false")]


def test_a_response_whose_tokens_the_run_did_not_save_is_no_damage(tmp_path, open_runs):
    """save_tensors = 0.05: most responses of a run; a file that is damaged, or gone although all
    were to be saved, is named.
    """
    folder = write_run(tmp_path / "run", steps=1)
    leave_out(folder, "Q0/0", share="0.05")
    rollout = of_run(open_runs, folder)
    assert (
        rollout["missing"] == []
        and rollout["notes"] == [NOT_SAVED.format("0.05")]
        and rollout["tokens"] == []
    )
    other = of_run(open_runs, folder, "1/rollouts/Q0%2F1")
    assert other["notes"] == other["missing"] == [] and other["tokens"]
    (folder / "rollouts_000001.safetensors").write_bytes(b"damaged")
    rollout = of_run(open_runs, folder)
    assert rollout["notes"] == [] and rollout["missing"][0].startswith(
        "rollouts_000001.safetensors: damaged"
    )
    leave_out(write_run(tmp_path / "all", steps=1), "Q0/0", share="true")
    rollout = of_run(open_runs, tmp_path / "all")
    assert rollout["notes"] == [] and len(rollout["missing"]) == 2


def test_while_a_run_is_indexed_nothing_counts_as_damaged(run_dir, tmp_path, client_of):
    runs = Runs([run_dir], tmp_path / "cache")  # nothing is read yet
    client = client_of(runs)
    (entry,) = client.get("/api/runs").json()
    assert entry["indexing"] == 0.0 and entry["warnings"] == []
    found = client.get("/api/runs/0/experts").json()
    assert found["missing"] == [] and found["notes"] == ["this run is being indexed (0%)"]
    missing = client.get("/api/runs/0/rollout/1/rollouts/Q0%2F0")
    assert missing.status_code == 404 and "being indexed (0%); reload" in missing.json()["detail"]
    runs.runs[0].update()
    assert client.get("/api/runs").json()[0]["indexing"] is None
    assert client.get("/api/runs/0/experts").json()["notes"] == []


def test_without_the_trainers_half(tmp_path, open_runs):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    (folder / "trained_000001.safetensors").unlink()
    rollout = of_run(open_runs, folder)
    assert (
        rollout["values"].keys() == {"log_mu", "advantage", "version"}
        and rollout["routes"]["trainer"] is None
    )
    assert "trained_000001.safetensors: not found" in rollout["missing"]
    assert any(
        "no tokenizer in" in text and "token ids are shown" in text for text in rollout["missing"]
    )
    assert rollout["tokens"][0]["text"] == f"<{rollout['tokens'][0]['id']}>"


@pytest.mark.parametrize(
    "name, kind",
    [("trained_000001", "old_logprobs"), ("trained_000001", "own_experts"), ("trained_000001",
    "flips"),
     ("trained_000001", "margin"), ("rollouts_000001", "logprobs"), ("rollouts_000001",
     "routed_experts")],
)  # fmt: skip
def test_a_tensor_of_another_length_is_named_and_not_shown(tmp_path, open_runs, name, kind):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    damage(
        folder,
        f"{name}.safetensors",
        lambda arrays: arrays.update({f"Q0/0:{kind}": arrays[f"Q0/0:{kind}"][:-1]}),
    )
    rollout = of_run(open_runs, folder)
    assert (
        any(text.startswith(f"Q0/0: {kind} of shape") for text in rollout["missing"])
        and rollout["tokens"]
    )


def test_the_trainers_half_of_another_attempt_is_not_shown(tmp_path, open_runs):
    """Its response was longer: nothing of it, not even its advantage, belongs to this one."""
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)

    def other(arrays):
        arrays["Q0/0:old_logprobs"] = np.append(arrays["Q0/0:old_logprobs"], np.float32(-1))
        arrays["Q0/0:advantage"] = np.array([77], np.float32)

    damage(folder, "trained_000001.safetensors", other)
    rollout = of_run(open_runs, folder)
    assert any("is of another response" in text for text in rollout["missing"])
    assert (
        rollout["values"].keys() == {"log_mu", "advantage", "version"}
        and 77 not in rollout["values"]["advantage"]
    )


def test_a_teachers_log_probs_stand_at_their_tokens(tmp_path, open_runs):
    folder = write_run(tmp_path / "run", steps=1)

    def scored(arrays):
        mu = arrays["Q0/0:logprobs"]
        arrays["Q0/0:teacher_logprobs"] = mu + np.arange(len(mu), dtype=np.float32) - 2

    damage(folder, "rollouts_000001.safetensors", scored)
    rollout = of_run(open_runs, folder)
    values, sampled = rollout["values"], rollout["meta"]["response_length"]
    places = [place for place, value in enumerate(values["log_mu"]) if value is not None]
    assert len(places) == sampled > 4 and rollout["missing"] == []
    gaps = [values["teacher_gap"][place] for place in places]
    assert gaps == pytest.approx([number - 2 for number in range(sampled)], abs=1e-6)
    for place, value in enumerate(values["log_teacher"]):
        gap, mu = values["teacher_gap"][place], values["log_mu"][place]
        assert value == (None if mu is None else pytest.approx(mu + gap, abs=1e-6))


def test_a_trained_line_names_no_other_file(tmp_path, open_runs):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    path = folder / "trained.jsonl"
    path.write_text(path.read_text().replace("trained_000001.safetensors", "../../etc/passwd"))
    assert "../../etc/passwd: not a file of the run" in of_run(open_runs, folder)["missing"]


def test_the_trainers_tensors_are_found_by_their_key(tmp_path, open_runs):
    """Two replicas' rollouts of one id, trained on one replica: the second's tensors are
    KEY:KIND.
    """
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    lines = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    swapped = {"Q0/0": "Q0/1@rollouts.dp1"}
    damage(
        folder,
        "trained_000001.safetensors",
        lambda arrays: [
            arrays.update({f"Q0/1@rollouts.dp1:{key.rpartition(':')[2]}": arrays.pop(key)})
            for key in [*arrays]
            if key.startswith("Q0/0:")
        ],
    )
    text = "".join(
        json.dumps(line | {"key": swapped.get(line["id"], line["id"])}) + "\n" for line in lines
    )
    (folder / "trained.jsonl").write_text(text)
    (tmp_path / "plain").mkdir()
    same = of_run(open_runs, write_run(tmp_path / "plain/run", steps=1, tokenizer=False))
    rollout = of_run(open_runs, folder)
    assert rollout["values"] == same["values"] and rollout["routes"] == same["routes"]
    found, expected = (
        expert_loads.loads_of_steps(open_runs(each).runs[0], "1")
        for each in (folder, tmp_path / "plain/run")
    )
    assert (found["trainer_load"] == expected["trainer_load"]).all() and found["swaps"] == expected[
        "swaps"
    ]


def test_a_rollout_of_which_no_tensors_were_saved(tmp_path, open_runs):
    folder = write_run(tmp_path / "run", steps=1, tokenizer=False)
    damage(
        folder,
        "rollouts_000001.safetensors",
        lambda arrays: [arrays.pop(k) for k in [*arrays] if k.startswith("Q0/0:")],
    )
    rollout = of_run(open_runs, folder)
    assert (
        rollout["tokens"] == []
        and "rollouts_000001.safetensors: no tensors of Q0/0" in rollout["missing"][0]
    )


# Pieces -------------------------------------------------------------------------------------------


def saved(tokenizer, folder):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Pieces(folder)


def test_pieces_of_a_byte_level_tokenizer(tmp_path):
    """Trained on bytes alone: a character outside ASCII is several tokens, each of which shows its
    bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=270,
    )
    tokenizer.train_from_iterator(["the the cat the cat"], trainer)
    pieces = saved(tokenizer, tmp_path / "bpe")
    text = "the cat\n\u00e9\u4f60\U0001f600 the<|end|>"
    ids = tokenizer.encode(text).ids
    assert b"".join(pieces.piece(token) for token in ids).decode() == text
    shown = shown_tokens(ids, pieces)
    assert [token["bytes"] for token in shown if "bytes" in token][:2] == ["c3", "a9"]
    assert next(token["text"] for token in shown if "bytes" in token) == "\\xc3"
    assert (
        shown[0]["text"] == "the"
        and shown[-1]["text"] == "<|end|>"
        and "\n" in [token["text"] for token in shown]
    )
    assert shown_tokens([10**6, -1], pieces) == [
        {"id": 10**6, "text": "<1000000>"},
        {"id": -1, "text": "<-1>"},
    ]


def test_pieces_of_a_tokenizer_with_byte_fallback(tmp_path):
    vocabulary = {"<unk>": 0, "\u2581the": 1, "\u2581": 2, "cat": 3, "<0xC3>": 4, "<0xA9>": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    pieces = saved(tokenizer, tmp_path / "fallback")
    assert [pieces.piece(token) for token in range(1, 6)] == [
        b" the",
        b" ",
        b"cat",
        b"\xc3",
        b"\xa9",
    ]


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, open_runs, content):
    folder = write_run(tmp_path / "run", steps=1)
    path = folder / "hf/tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    rollout = of_run(open_runs, folder)
    assert any(
        str(folder / "hf") in text and "token ids are shown" in text for text in rollout["missing"]
    )
    assert rollout["tokens"][0]["text"].startswith("<")


def test_the_tokenizer_of_the_model_that_the_config_names(tmp_path, open_runs, monkeypatch):
    """A relative model.path is relative to where training started: a folder above the run."""
    folder = write_run(tmp_path / "project/runs/run", steps=1)
    (folder / "hf").rename(tmp_path / "project/model")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(str(folder / "hf"), "model"))
    monkeypatch.chdir("/")
    rollout = of_run(open_runs, folder)
    assert rollout["missing"] == [] and rollout["tokens"][0]["text"] in VOCABULARY


# Experts ------------------------------------------------------------------------------------------


def test_loads_flips_and_swaps_are_those_of_a_loop_over_tokens(client, tensors):
    found = client.get("/api/runs/0/experts?step=2:3").json()
    load = {half: np.zeros((LAYERS, EXPERTS)) for half in ("server", "trainer")}
    swaps: dict[tuple[int, int, int], int] = {}
    flips, pairs = np.zeros(LAYERS), 0
    for step in (2, 3):
        for prompt in range(PROMPTS):
            for k in range(GROUP):
                halves = tensors(
                    step, "rollouts.dp1" if prompt % 2 else "rollouts", f"Q{prompt}/{k}"
                )
                server, own = halves["server"]["routed_experts"], halves["trainer"]["own_experts"]
                pairs += len(server)
                for row, layer in np.ndindex(len(server), LAYERS):
                    a, b = server[row, layer].tolist(), own[row, layer].tolist()
                    for half, ids in (("server", a), ("trainer", b)):
                        load[half][layer, ids] += 1
                    flips[layer] += set(a) != set(b)
                    for before, after in zip(
                        [e for e in a if e not in b], [e for e in b if e not in a], strict=True
                    ):
                        swaps[layer, before, after] = swaps.get((layer, before, after), 0) + 1
    assert (
        found["steps"] == [2, 3]
        and (found["layers"], found["experts"]) == (LAYERS, EXPERTS)
        and found["missing"] == []
    )
    for half in ("server", "trainer"):
        assert np.allclose(found[f"{half}_load"], load[half] / load[half].sum(1, keepdims=True))
    assert np.allclose(found["flips_by_layer"], flips / pairs)
    assert sum(found["margin_histogram"]["flipped"]) == flips.sum()
    assert sum(found["margin_histogram"]["kept"]) == pairs * LAYERS - flips.sum()
    listed = {(each["layer"], each["from"], each["to"]): each["count"] for each in found["swaps"]}
    assert all(swaps[key] == count for key, count in listed.items())
    assert (
        sorted(listed.values(), reverse=True)
        == sorted(swaps.values(), reverse=True)[: expert_loads.NUM_SWAPS]
    )
    over = found["flips_by_layer_over_steps"]
    assert over["steps"] == [1, 2, 3, 4, 5, 6] and np.shape(over["values"]) == (6, LAYERS)


@pytest.mark.parametrize(
    "wanted, steps", [("", [6]), ("3", [3]), ("5:", [5, 6]), (":2", [1, 2]), ("9:12", [])]
)
def test_the_steps_that_are_read(client, wanted, steps):
    found = client.get("/api/runs/0/experts", params={"step": wanted}).json()
    assert found["steps"] == steps and bool(found["notes"]) is (not steps)
    assert client.get("/api/runs/0/experts?step=a:b").status_code == 400


def test_many_steps_are_read_at_intervals():
    chosen = expert_loads.chosen_steps(range(1, 1001), "1:1000")
    assert len(chosen) == expert_loads.MAX_STEPS and chosen[0] == 1 and chosen[-1] == 1000


def test_the_load_of_one_expert_over_the_steps(client):
    """The same shares as the answer for each step alone."""
    steps = client.get("/api/runs/0/expert?layer=1&expert=2").json()
    assert (
        steps["steps"] == client.get("/api/runs/0/experts?step=1:100").json()["steps"]
        and len(steps["steps"]) > 2
    )
    for place, step in enumerate(steps["steps"]):
        alone = client.get(f"/api/runs/0/experts?step={step}").json()
        assert steps["server"][place] == pytest.approx(alone["server_load"][1][2], abs=1e-6)
        assert steps["trainer"][place] == pytest.approx(alone["trainer_load"][1][2], abs=1e-6)
    assert len(set(steps["server"])) > 1, "a curve, not one number"
    nothing = client.get(f"/api/runs/0/expert?layer={LAYERS}&expert=0").json()
    assert set(nothing["server"]) == {None} and nothing["steps"] == steps["steps"]
    assert client.get("/api/runs/0/expert?layer=-1&expert=0").status_code == 400
    assert client.get("/api/runs/0/expert?layer=0").status_code == 400


def test_experts_without_the_trainers_half(tmp_path, open_runs):
    folder = write_run(tmp_path / "run", steps=2, tokenizer=False)
    (folder / "trained_000002.safetensors").write_bytes(b"damaged")
    found = expert_loads.loads_of_steps(open_runs(folder).runs[0], "2")
    assert (
        found["trainer_load"] is None and found["margin_histogram"] is None and found["swaps"] == []
    )
    assert np.shape(found["server_load"]) == (LAYERS, EXPERTS)
    assert any(text.startswith("trained_000002.safetensors: damaged") for text in found["missing"])
    json.dumps(found["missing"])
