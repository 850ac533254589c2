"""verify-replay --model my.toml takes the model and the layout of a configuration, with any other
settings.
"""

import json

import pytest

from megatron_rl_tools.verify_replay.random_checkpoint import small_config
from megatron_rl_tools.verify_replay.verify_replay import main

OTHERS = {
    "loss": '[loss]\nname = "dapo"\ndual_clip = 3.0',
    "sections that need one another": """[loss]
name = "gmpo"
[run]
num_mini_batches = 2
[lora]
rank = 4
[optim]
distributed = true
lr = 1e-6
[megatron]
optimizer_cpu_offload = true
optimizer_offload_fraction = 1.0
moe_permute_fusion = false""",
    "stages": "[parallel]\nlayers_per_stage = [48]",
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_the_proof_does_not_read_are_accepted(name, tmp_path, capsys):
    hf = small_config(num_layers=48, num_experts=8, top_k=2, first_k_dense=1, tp=1, etp=1)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    toml = tmp_path / "my.toml"
    dtype = 'dtype = "bfloat16"'
    toml.write_text(f'[model]\npath = "{tmp_path}"\n{dtype}\n[data]\ntrain = "x"\n{OTHERS[name]}\n')
    command = ["--model", str(toml), "--shrink", "--no-reference", "--device", "cpu", "--json"]
    status = main(command)
    printed = capsys.readouterr()
    assert status == 0, printed.err + printed.out
    report = json.loads(printed.out)
    assert all(check["passed"] for check in report["checks"])


def test_the_fields_of_the_model_are_those_of_the_configuration(tmp_path, capsys):
    toml = tmp_path / "my.toml"
    hf = small_config(num_layers=2, num_experts=8, top_k=2, first_k_dense=0, tp=1, etp=1)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    toml.write_text(
        f'[model]\npath = "{tmp_path}"\n[data]\ntrain = "x"\n[megatron]\nno_such_field = 1\n'
    )
    assert main(["--model", str(toml), "--no-reference", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-rl verify-replay: ") and "no_such_field" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m.toml", "--experts", "32"], "--model m.toml: no effect of --experts, as"),
        (["--model", "m.toml", "--shrink", "--num-layers", "2"], "no effect of --num-layers, as"),
        (
            ["--model", "qwen3-30b-a3b", "--shrink", "--topk", "4", "--first-k-dense", "0"],
            "no effect of --topk, --first-k-dense, as",
        ),
        (["--shrink"], "--shrink has no effect without --model"),
    ],
)
def test_sizes_without_an_effect_are_refused_by_name(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
