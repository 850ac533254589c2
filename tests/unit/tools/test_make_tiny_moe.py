"""The tiny checkpoint, with settings that train in a few seconds."""

import hashlib
import json
import re

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from examples.paper_long.reward import ledger
from examples.tools_cpu.calculator import ERROR, calculate
from megatron_rl_tools.make_tiny_moe import make_tiny_moe, read_recipe, sampled_accuracy
from megatron_rl_tools.tiny_tasks import TASKS, Example
from megatron_rl_tools.tiny_text import EOS, VOCABULARY, encode_text

QUICK = {"skill": 0.01, "decay_steps": 10, "target_accuracy": 0.004}  # stops long before it can add


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("tiny") / "moe", **QUICK)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def sum_of(a, b):
    return Example(f"{a}+{b}=", str(a + b), (str(a + b),))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_is_an_hf_checkpoint_as_described_in_its_manifest(checkpoint):
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert (
        model.config.num_hidden_layers,
        model.config.num_experts_per_tok,
        model.config.norm_topk_prob,
    ) == (
        4,
        2,
        True,
    )
    assert (
        tokenizer.vocab_size == model.config.vocab_size
        and tokenizer.eos_token_id == model.config.eos_token_id
    )
    assert tokenizer.decode(tokenizer("12+34= 46")["input_ids"]) == "12+34= 46"
    assert tokenizer("12+34=")["input_ids"] == encode_text([sum_of(12, 34)]).tokens[0, :6].tolist()
    pairs = [
        tuple(map(int, row["prompt"][:-1].split("+"))) for row in rows(checkpoint / "heldout.jsonl")
    ]
    accuracy = sampled_accuracy(model, encode_text([sum_of(*pair) for pair in pairs]))
    assert accuracy == pytest.approx(read_recipe(checkpoint)["heldout_accuracy"], abs=1e-5)
    assert accuracy == pytest.approx(0.004, rel=0.5)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in checkpoint.iterdir())


def test_prompt_sets_are_disjoint_and_correct(checkpoint):
    train, heldout = rows(checkpoint / "train.jsonl"), rows(checkpoint / "heldout.jsonl")
    assert (len(train), len(heldout)) == (7900, 200)
    assert len({row["prompt"] for row in train + heldout}) == 8100
    assert all(
        sum(map(int, row["prompt"][:-1].split("+"))) == int(row["label"]) for row in train + heldout
    )


def test_sampled_accuracy_is_the_frequency_of_correct_samples(checkpoint):
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint)
    # a sharper head, so that a few thousand samples include enough correct answers
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    data = encode_text([sum_of(10, 10)])
    tokens, expected = data.tokens, sampled_accuracy(model, data)
    samples = model.generate(
        tokens[:, :6].repeat(4000, 1),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=3,
    )
    seen = (samples[:, 6:9] == tokens[:, 6:9]).all(1).double().mean().item()
    assert 0.001 < expected < 0.9
    assert abs(seen - expected) < 5 * (expected * (1 - expected) / 4000) ** 0.5


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_the_cache_is_used(checkpoint, tmp_path, capsys):
    again = make_tiny_moe(tmp_path / "again", **QUICK)
    assert digests(again) == digests(checkpoint)
    before = (again / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    make_tiny_moe(again, **QUICK)
    assert "up to date" in capsys.readouterr().out
    assert (again / "model.safetensors").stat().st_mtime_ns == before
    make_tiny_moe(again, **{**QUICK, "num_heldout": 300}, quiet=True)
    assert len(rows(again / "heldout.jsonl")) == 300


def test_a_directory_of_another_program_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="not written by this tool"):
        make_tiny_moe(tmp_path, **QUICK)
    assert (tmp_path / "thesis.tex").exists()


def test_invalid_settings_and_a_failed_cold_start_are_errors(tmp_path):
    with pytest.raises(ValueError, match="target_accuracy = 1.5 must lie between 0 and 1"):
        make_tiny_moe(tmp_path / "x", target_accuracy=1.5)
    with pytest.raises(ValueError, match="task = 'chess' must be one of sums, flips, both, tool"):
        make_tiny_moe(tmp_path / "x", task="chess")
    with pytest.raises(RuntimeError, match="sums not learnt"):
        make_tiny_moe(tmp_path / "x", max_steps=2)
    assert not (tmp_path / "x").exists()


def test_the_demos_calculator_answers_as_the_model_was_shown():
    train, heldout = TASKS["tools"].make(0, 200)
    assert (len(train), len(heldout)) == (7900, 200) and not {e.prompt for e in train} & {
        e.prompt for e in heldout
    }
    for example in heldout:
        first, second, last = example.turns
        assert (calculate(first), calculate(second)) == example.answers and last == example.label
        a, b, c = map(int, example.prompt[:-1].replace("*", "+").split("+"))
        assert a * b + c == int(example.label)
    ((first_step, (shown, direct)),) = TASKS["tools"].stages(train[:1])
    assert (first_step, shown) == (0, train[0])
    assert (direct.prompt, direct.turns, direct.answers) == (train[0].prompt, (train[0].label,), ())
    assert {calculate(wrong) for wrong in ("[1*2", "[1/2]", "[*2]", "[1*2]3", "[[1*2]")} == {ERROR}


def test_a_ledger_is_written_out_item_by_item_and_ends_in_its_sum():
    train, heldout = TASKS["ledger"].make(0, 200)
    assert (len(train), len(heldout)) == (7900, 200) and not {e.prompt for e in train} & {
        e.prompt for e in heldout
    }
    assert {len(example.prompt) // 2 for example in train} == set(range(10, 27))
    for example in heldout:
        digits = [int(digit) for digit in re.findall("[a-z]([0-9])", example.prompt)]
        (turn,) = example.turns
        items = re.findall("([a-z])([0-9]):([0-9][0-9])([.,;!?/&@])", turn)
        assert "".join(name + digit for name, digit, _, _ in items) + "=" == example.prompt
        assert [int(total) for _, _, total, _ in items] == [
            sum(digits[: n + 1]) % 100 for n in range(len(digits))
        ]
        assert turn == "".join(f"{n}{d}:{t}{mark}" for n, d, t, mark in items) + "=" + example.label
        assert 60 <= len(turn) <= 160 and int(example.label) == sum(digits) % 100
        assert (ledger("", turn, example.label), ledger("", turn + "1", example.label)) == (
            1.0,
            0.0,
        )
        assert ledger("", example.label, example.label) == 0.0, "an answer alone is not the task"
    stages = TASKS["ledger"].stages(train)
    assert [first for first, _ in stages] == [0, 300, 500] and stages[-1][1] is train
    assert max(len(example.turns[0]) for example in stages[0][1]) == 6 * 6 + 3


def test_free_choices_are_learned_but_not_judged():
    data = encode_text([Example("a1=", "01", ("a1:01!=01",))], free="!?")
    (tokens,) = data.tokens.tolist()
    free = [
        place
        for place in range(len(tokens))
        if data.is_models[0, place] and not data.is_judged[0, place]
    ]
    assert [VOCABULARY[tokens[place]] for place in free] == ["!"]
    assert encode_text([sum_of(12, 34)]).is_judged.equal(encode_text([sum_of(12, 34)]).is_models)


def test_only_what_the_model_writes_is_learned_from():
    data = encode_text([Example("1*2=", "2", ("[1*2]", "2"), ("=2 ",)), Example("7=", "7", ("7",))])
    text = [[VOCABULARY[token] for token in row] for row in data.tokens.tolist()]
    assert text[0] == [*"1*2=[1*2]", EOS, *"=2 2", EOS]
    written = [
        "".join(token for token, mine in zip(*row, strict=True) if mine)
        for row in zip(text, data.is_models.tolist(), strict=True)
    ]
    assert written == [f"[1*2]{EOS}2{EOS}", f"7{EOS}"]
