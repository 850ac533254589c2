"""Broken configurations and command lines: --dry-run refuses each with status 2 and a message of
key, value, rule and fix.

Most run in one process; a few are started as commands and timed.  No torch, no model: files are a
few bytes.
"""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.options import parse
from megatron_rl.plan.dry_run import print_report
from megatron_rl.plan.functions import problem_of
from tests.plain_checkpoint import DENSE, MOE, TOKENIZER, checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The current directory: a configuration that would run, its files, and broken ones."""
    folder = tmp_path_factory.mktemp("broken")
    checkpoint(folder / "moe", MOE)
    checkpoint(folder / "dense", DENSE)
    checkpoint(folder / "plan_only", MOE, None, None)
    checkpoint(folder / "no_tokenizer", MOE, None)
    checkpoint(folder / "no_eos", MOE, {**TOKENIZER, "eos_token": None})
    checkpoint(folder / "no_template", MOE, {**TOKENIZER, "chat_template": None})
    checkpoint(folder / "no_weights", MOE, weights=None)
    checkpoint(folder / "cut", MOE, weights=(folder / "moe/model.safetensors").read_bytes()[:-3])
    checkpoint(folder / "lfs", MOE, weights=b"version https://git-lfs.github.com/spec/v1\n")
    checkpoint(folder / "gap", MOE)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "gap/model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint(folder / "unknown", {**MOE, "architectures": ["MambaForCausalLM"]})
    checkpoint(folder / "extra", {**MOE, "attn_logit_softcapping": 30.0})
    checkpoint(
        folder / "no_size", {key: value for key, value in MOE.items() if key != "hidden_size"}
    )
    (folder / "moe_broken").mkdir()
    (folder / "moe_broken/config.json").write_text("{")
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "half.jsonl").write_text(
        '{"prompt": "1 + 1", "label": "2"}\n{"prompt": "1 + 2"}\n{"prompt\n'
    )
    (folder / "train.csv").write_text("prompt,label\n")
    (folder / "train.parquet").write_text("no parquet")
    functions = "def score(prompt, response, label): ...\ndef two(a, b): ...\n"
    (folder / "rewards.py").write_text("import torch_is_not_imported\n" + functions)
    (folder / "syntax.py").write_text("def score(:\n")
    (folder / "not_utf8.toml").write_bytes(b"[run]\nname = '\xff'\n")
    (folder / "runs").mkdir()
    minimal = {"model": {"path": "moe"}, "data": {"train": "train.jsonl"}}
    for name, config in (
        ("started", load_config(None, [], minimal).model_dump(mode="json")),
        ("damaged", None),
    ):
        (folder / f"runs/{name}/checkpoints/step_000001").mkdir(parents=True)
        (folder / f"runs/{name}/checkpoints/step_000001/state.json").write_text(
            json.dumps({"config": config, "step": 3})
        )
    (folder / "good.toml").write_text('[model]\npath = "moe"\n[data]\ntrain = "train.jsonl"\n')
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    os.chdir(before)


@pytest.fixture
def refuse(here, capsys, monkeypatch):
    """Run a command line as train.py does with --dry-run; returns (status, standard output,
    standard error).
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = print_report(*parse(["--dry-run", *arguments]))
        except SystemExit as stop:  # argparse exits
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


SPELLING = [  # command line; parts of the message: key, value, rule, fix
    ("--run.num_step 5", "run.num_step = '5'", "unknown key", "did you mean 'num_steps'?"),
    (
        "--optim.learning_rate 1e-6",
        "optim.learning_rate = '1e-6'",
        "unknown key",
        "did you mean optim.lr?",
    ),
    (
        "--run.temperature 0.7",
        "run.temperature = '0.7'",
        "unknown key",
        "did you mean rollout.temperature or eval.temperature?",
    ),
    ("--runs.num_steps 5", "[runs]", "unknown section", "did you mean 'run'?"),
    (
        "--num_steps 5",
        "unknown option --num_steps",
        "settings are --section.key VALUE",
        "did you mean --run.num_steps?",
    ),
    (
        "run.num_steps=5",
        "'run.num_steps=5'",
        "does not follow an option",
        "write --run.num_steps 5",
    ),
    ("--run.seed 1 2", "--run.seed has 2 values, 1 2", "it takes one", "write --run.seed VALUE"),
    ("--run.num_steps", "--run.num_steps has no value", "", "write --run.num_steps VALUE"),
    ("--dry-rum", "--dry-rum", "unknown option", "did you mean --dry-run?"),
    ("--confg x.toml", "--confg", "unknown option", "did you mean --config?"),
    ("--gpus 0", "--gpus", "must be a positive integer", "got '0'"),
    ("--gpus many", "--gpus", "must be a positive integer", "got 'many'"),
    ("--only train", "--only", "invalid choice: 'train'", "rollout"),
    (
        "--only rollout --from-rollouts other",
        "--from-rollouts",
        "not allowed with argument --only",
        "",
    ),
    (
        "--eval.sets aime24",
        "--eval.sets aime24",
        "takes pairs, NAME VALUE",
        "'aime24' has no value",
    ),
]
VALUES = [
    ("--run.num_steps five", "run.num_steps = 'five'", "must be a valid integer", "default, 60"),
    ("--run.num_steps 0", "run.num_steps = '0'", "must be greater than 0", "default, 60"),
    ("--run.seed -1", "run.seed = '-1'", "must be greater than or equal to 0", "default, 0"),
    (
        "--run.seed 4294967296",
        "run.seed = '4294967296'",
        "must be less than 4294967296",
        "default, 0",
    ),
    ("--run.seed 1.5", "run.seed = '1.5'", "must be a valid integer", "default, 0"),
    ("--run.name=", "run.name = ''", "at least 1 character", "default, 'run'"),
    ("--run.device gpu", "run.device = 'gpu'", "'auto', 'cpu' or 'cuda'", "default, 'auto'"),
    (
        "--run.collective_timeout_minutes inf",
        "collective_timeout_minutes = 'inf'",
        "must be a finite number",
        "default, 30",
    ),
    ("--optim.lr nan", "optim.lr = 'nan'", "must be a finite number", "default, 1e-06"),
    ("--optim.lr -1e-6", "optim.lr = '-1e-6'", "greater than or equal to 0", "default, 1e-06"),
    ("--optim.beta2 1.0", "optim.beta2 = '1.0'", "less than 1", "default, 0.95"),
    ("--optim.eps 0", "optim.eps = '0'", "greater than 0", "default, 1e-08"),
    (
        "--optim.weight_decay -0.1",
        "optim.weight_decay = '-0.1'",
        "greater than or equal to 0",
        "default, 0.0",
    ),
    ("--loss.name minrl", "loss.name = 'minrl'", "is not a known loss", "did you mean 'minirl'?"),
    (
        "--loss.entropy_coef inf",
        "loss.entropy_coef = 'inf'",
        "must be a finite number",
        "default, 0.0",
    ),
    (
        "--model.dtype float16",
        "model.dtype = 'float16'",
        "must be 'float32' or 'bfloat16'",
        "default, 'bfloat16'",
    ),
    (
        "--model.provider brige",
        "model.provider = 'brige'",
        "'native', 'bridge' or 'auto'",
        "default, 'native'",
    ),
    (
        "--model.token_dispatcher flex",
        "token_dispatcher = 'flex'",
        "'alltoall' or 'allgather'",
        "default, 'alltoall'",
    ),
    (
        "--replay.mode r3",
        "replay.mode = 'r3'",
        "must be 'none', 'R2' or 'R3'",
        "did you mean 'R3'?",
    ),
    (
        "--replay.missing_route_budget 2",
        "replay.missing_route_budget = '2'",
        "less than or equal to 1",
        "default, 0.01",
    ),
    ("--advantage.kind gae", "advantage.kind = 'gae'", "'leave_one_out'", "default, 'auto'"),
    (
        "--rollout.quantize int8",
        "rollout.quantize = 'int8'",
        "must be 'none' or 'fp8'",
        "default, 'none'",
    ),
    ("--rollout.top_p 0.9", "top_k = -1 with top_p = 0.9", "must be at least 2", "set top_k"),
    (
        "--rollout.top_k 5000",
        "top_k = 5000",
        "at most the servers' --sampling-mask-max-tokens = 4096",
        "lower it",
    ),
    (
        "--rollout.repetition_penalty 1.1",
        "repetition_penalty = '1.1'",
        "over the whole vocabulary",
        "remove the key",
    ),
    ("--rollout.temperature 0", "rollout.temperature = '0'", "greater than 0", "default, 1.0"),
    (
        "--rollout.urls 10.0.0.2:30000",
        "rollout.urls has '10.0.0.2:30000'",
        "http://HOST:PORT",
        "write http://10.0.0.2:30000",
    ),
    (
        "--rollout.urls http://a:99999",
        "rollout.urls has 'http://a:99999'",
        "http://HOST:PORT",
        "write a host name or address",
    ),
    (
        "--rollout.urls http://fd00::2:30000",
        "rollout.urls has 'http://fd00::2:30000'",
        "http://HOST:PORT",
        "write http://[fd00::2]:30000",
    ),
    (
        "--rollout.urls http://me:passw0rd@a:1 --rollout.api_key_env KEY",
        "rollout.urls has a user and password for a",
        "one Authorization header",
        "remove the part before @",
    ),
    (
        "--rollout.urls http://a:1 http://a:1/",
        "rollout.urls names http://a:1",
        "one address for each server",
        "remove one",
    ),
    ("--rollout.port 70000", "rollout.port = '70000'", "less than 65536", "default, 0"),
    (
        "--reward.function maths",
        "reward.function = 'maths'",
        "must be math or package.module",
        "like rewards.mine:score",
    ),
    (
        "--reward.on_error skip",
        "reward.on_error = 'skip'",
        "'raise' or 'drop' or be a valid number",
        "default, 0.0",
    ),
    (
        "--data.template question",
        "data.template = 'question'",
        "must contain {prompt} once",
        "where the prompt goes",
    ),
    (
        "--parallel.layers_per_stage 4 0",
        "parallel.layers_per_stage[1] = '0'",
        "greater than 0",
        "default, ()",
    ),
]
LAYOUTS = [
    (
        "--parallel.tp 3",
        "parallel.tp = 3",
        "must divide the model's num_attention_heads, 4",
        "use one of 1, 2, 4",
    ),
    (
        "--parallel.tp 4",
        "parallel.tp = 4",
        "must divide the model's num_key_value_heads, 2",
        "use one of 1, 2",
    ),
    (
        "--parallel.ep 3",
        "parallel.ep = 3",
        "must divide the model's number of experts, 8",
        "use one of 1, 2, 4, 8",
    ),
    (
        "--parallel.ep 2 --parallel.etp 3",
        "parallel.etp = 3",
        "moe_intermediate_size, 32",
        "use one of 1, 2, 4, 8, 16, 32",
    ),
    ("--parallel.pp 3", "parallel.pp x vp = 3", "num_hidden_layers", "set layers_per_stage"),
    (
        "--parallel.pp 2 --parallel.vp 4",
        "parallel.pp x vp = 8",
        "num_hidden_layers",
        "use one of 1, 2, 4",
    ),
    ("--parallel.vp 2", "parallel.vp = 2", "needs parallel.pp > 1", "interleaves pipeline stages"),
    (
        "--parallel.pp 2 --parallel.layers_per_stage 3 2",
        "layers_per_stage = [3, 2] adds up to 5",
        "is 4",
        "change a count",
    ),
    (
        "--parallel.pp 2 --parallel.layers_per_stage 4",
        "layers_per_stage = [4]",
        "must name 2 stages",
        "write 2 numbers",
    ),
    (
        "--parallel.tp 2 --gpus 3",
        "tp x pp x cp = 2 x 1 x 1",
        "must divide the number of ranks, 3",
        "start a multiple of 2",
    ),
    (
        "--parallel.ep 4 --gpus 6",
        "etp x ep x pp = 1 x 4 x 1",
        "must divide the number of ranks, 6",
        "start a multiple of 4",
    ),
    ("--gpus 5", "run.prompts_per_step = 16", "must be a multiple of 5", "set it to 20"),
    (
        "--parallel.sequence_parallel",
        "sequence_parallel = true",
        "no effect with parallel.tp = 1",
        "remove the key",
    ),
    (
        "--parallel.tp 2 --parallel.no_sequence_parallel",
        "sequence_parallel = false",
        "MoE needs it",
        "remove the key",
    ),
    (
        "--parallel.pp 2 --parallel.vp 2 --run.prompts_per_step 1 --run.group_size 3",
        "3 responses",
        "parallel.pp = 2",
        "change",
    ),
    (
        "--parallel.pp 2 --model.token_dispatcher allgather",
        "allgather with parallel.pp = 2",
        "refuses it",
        "use alltoall",
    ),
    (
        "--model.recompute full --model.recompute_layers 3",
        "recompute_layers = 3",
        "must divide the layers",
        "one of 1, 2, 4",
    ),
    (
        "--model.path dense --parallel.ep 2 --replay.mode none --replay.no_measure",
        "parallel.ep = 2",
        "no experts",
        "set it to 1",
    ),
]
CONFLICTS = [
    (
        "--model.path dense",
        "replay.mode = R3",
        "the model has no MoE layer",
        "set replay.mode = none",
    ),
    (
        "--run.prompts_per_step 10 --run.num_mini_batches 4",
        "prompts_per_step = 10",
        "a multiple of",
        "num_mini_batches = 4",
    ),
    (
        "--run.group_size 1",
        "run.group_size >= 2, got 1",
        "advantage.kind = mean",
        "or set advantage.kind = batch_whitened",
    ),
    (
        "--model.recompute_layers 2",
        "model.recompute_layers = 2",
        "no effect with model.recompute = none",
        "remove it, or set",
    ),
    (
        "--run.device cpu --model.layer_spec transformer_engine",
        "transformer_engine",
        "needs a GPU",
        "use auto or local",
    ),
    (
        "--replay.on_missing_route mask_token --replay.mode R2",
        "replay.on_missing_route = mask_token",
        "needs replay.mode = R3, got R2",
        "use live",
    ),
    (
        "--replay.mode none --replay.no_measure --replay.on_missing_route live",
        "replay.on_missing_route = live",
        "asks for no routes",
        "remove it",
    ),
    (
        "--rollout.partial resume",
        "rollout.partial = resume",
        "needs over_sample > 0, got 0",
        "max_staleness >= 1",
    ),
    (
        "--rollout.max_staleness 1 --loss.name grpo",
        "rollout.max_staleness = 1 with loss.name = grpo",
        "no importance weight against mu",
        "set loss.weight = train_infer",  # form = ratio has pi/pi_old already
    ),
    (
        "--loss.name rspo",
        "loss.router_shift = true (loss.name = rspo) has no effect",
        "run.num_mini_batches above 1",
        "gmpo",
    ),
    (
        "--rollout.max_staleness 1 --loss.name cispo",
        "with loss.name = cispo",
        "against mu",
        "set loss.weight = total",
    ),
    (
        "--rollout.max_staleness 3 --run.num_steps 3",
        "rollout.max_staleness = 3 can never be used with run.num_steps = 3",
        "no token is older than 2 weight syncs",
        "lower it",
    ),
    (
        "--rollout.weight_update in_place --rollout.max_staleness 1 --agent.function a:b",
        "rollout.weight_update = in_place with agent.function = 'a:b'",
        "too old between them would not be cut short",
        "set rollout.weight_update = abort",
    ),
    (
        "--rollout.weight_update abort",
        "rollout.weight_update = abort",
        "no effect with max_staleness = 0",
        "raise max_staleness",
    ),
    (
        "--rollout.weight_sync colocated --rollout.urls http://a:1",
        "weight_sync = colocated",
        "urls = ['http://a:1']",
        "weight_sync = distributed",
    ),
    (
        "--rollout.release_memory",
        "release_memory = true",
        "needs weight_sync = colocated, got distributed",
        "remove it",
    ),
    (
        "--rollout.quantize_keep *",
        "rollout.quantize_keep",
        "no effect with rollout.quantize = none",
        "rollout.quantize = fp8",
    ),
    (
        "--rollout.urls http://a:1 --rollout.num_servers 2",
        "num_servers = 2",
        "no effect with urls",
        "remove urls",
    ),
    (
        "--rollout.num_servers 2 --rollout.gpus 0 1 2",
        "gpus = [0, 1, 2]",
        "a multiple of num_servers = 2",
        "must be distinct",
    ),
    (
        "--rollout.num_servers 2 --rollout.port 65535",
        "port = 65535",
        "above 65535",
        "set port to at most 65534",
    ),
    (
        "--rollout.host 0.0.0.0",
        "rollout.host = '0.0.0.0'",
        "reached from other machines",
        "set rollout.api_key_env",
    ),
    (
        "--rollout.server_args=--model-path=x",
        "server_args has --model-path",
        "this run sets itself",
        "set model.path",
    ),
    (
        "--rollout.max_total_tokens 512",
        "max_response_tokens = 1024",
        "rollout.max_total_tokens = 512",
        "raise rollout.max_total_tokens",
    ),
    (
        "--rollout.max_response_tokens 5000",
        "max_response_tokens = 5000",
        "max_position_embeddings = 4096",
        "lower one of them",
    ),
    ("--eval.every 5", "eval.every = 5", "eval.sets names no file", "set eval.sets"),
    ("--eval.pass_at 8", "eval.pass_at = [8]", "samples = 4", "raise samples"),
    ("--eval.top_k 0", "top_k = 0", "at least 1", "set top_k = -1"),
    (
        (
            "--eval.sets aime a.jsonl --checkpoint.best_metric eval/aime/avg@8"
            " --checkpoint.keep_last 2"
        ),
        "eval/aime/avg@8",
        "eval.sets names aime",
        "write eval/NAME/avg@4",
    ),
    (
        (
            "--eval.sets aime a.jsonl --checkpoint.best_metric eval/aime/accuracy"
            " --checkpoint.keep_last 2"
        ),
        "eval/aime/accuracy",
        "eval.sets names aime",
        "write eval/NAME/avg@4",
    ),
    *(
        (
            "--eval.sets aime a.jsonl --checkpoint.best_metric eval/aime/avg@4"
            f" --checkpoint.keep_last 2 {every}",
            "checkpoint.best_metric = eval/aime/avg@4",
            "no step before the last one, run.num_steps = 60, is both saved and evaluated",
            fix,
        )
        for every, fix in (
            ("--checkpoint.every 7 --eval.every 20", "set eval.every = 7"),
            ("--checkpoint.every 20 --eval.every 0", "set eval.every = 20"),
            ("--checkpoint.every 15 --eval.every 20", "set eval.every = 15"),
        )
    ),
    (
        "--checkpoint.no_resume --resume",
        "resume = false",
        "contradicts require = true",
        "remove one of them",
    ),
    (
        "--checkpoint.best_metric eval/aime/avg@4 --checkpoint.keep_last 2",
        "eval/aime/avg@4",
        "eval.sets names no file",
        "write",
    ),
    (
        "--loss.clip none --loss.clip_low 0.1",
        "loss.clip_low = 0.1",
        "no effect with loss.name = minirl",
        "set loss.clip",
    ),
    (
        "--batch.overlong_cache 5000",
        "batch.overlong_cache = 5000",
        "exceeds rollout.max_response_tokens = 1024",
        "lower it",
    ),
]
FILES = [
    ("--config none.toml", "--config none.toml", "no such file", "paths are relative to"),
    ("--config runs", "--config runs", "cannot be read", "name a TOML file"),
    ("--config not_utf8.toml", "--config not_utf8.toml", "not valid TOML", "utf-8"),
    (
        "--model.path none",
        "model.path = none",
        "no such folder",
        "to plan with published sizes, --model.path olmoe",
    ),
    (
        "--model.path train.jsonl",
        "model.path = train.jsonl",
        "Not a directory",
        "give an HF checkpoint directory",
    ),
    ("--model.path moe_broken", "moe_broken/config.json", "not valid JSON", "line 1"),
    ("--model.path unknown", "MambaForCausalLM", "not supported", "supported: "),
    (
        "--model.path extra",
        "attn_logit_softcapping = 30.0",
        "would be ignored",
        "remove it from config.json",
    ),
    ("--model.path no_size", "hidden_size is missing", "config.json", ""),
    ("--model.path no_tokenizer", "model.path = no_tokenizer", "no tokenizer", "copy it there"),
    (
        "--model.path no_eos",
        "model.path = no_eos",
        "no eos token",
        "set it in tokenizer_config.json",
    ),
    (
        "--model.path no_template",
        "data.chat_template = true",
        "no chat template",
        "set data.chat_template = false",
    ),
    ("--model.path no_weights", "model.path = no_weights", "no safetensors files", "download them"),
    (
        "--model.path cut",
        "cut/model.safetensors",
        "not a complete safetensors file",
        "download it again",
    ),
    (
        "--model.path lfs",
        "lfs/model.safetensors",
        "not a complete safetensors file: Error while deserializing header",
        "download it again",
    ),
    (
        "--model.path gap",
        "model.safetensors.index.json",
        "names files that are not there: model-2.safetensors",
        "download them",
    ),
    ("--data.train none.jsonl", "data.train = none.jsonl", "no such file", "paths are relative to"),
    (
        "--data.train runs",
        "data.train = runs",
        "it is a directory",
        "name a .jsonl or .parquet file",
    ),
    ("--data.train empty.jsonl", "data.train = empty.jsonl", "no prompts in it", ""),
    (
        "--data.train half.jsonl",
        "half.jsonl, line 2: key 'label' is missing",
        "line 3: not JSON",
        "it has ['prompt']",
    ),
    (
        "--data.train train.csv",
        "data.train = train.csv",
        "unknown suffix '.csv'",
        ".jsonl or .parquet",
    ),
    ("--data.train train.parquet", "data.train = train.parquet", "not a parquet file", ""),
    (
        "--data.prompt_key question",
        "line 1: key 'question' is missing",
        "",
        "it has ['prompt', 'label']",
    ),
    (
        "--eval.sets aime none.jsonl",
        "eval.sets.aime = none.jsonl",
        "no such file",
        "paths are relative to",
    ),
    (
        "--reward.function nowhere.rewards:score",
        "'nowhere.rewards:score'",
        "there is no module 'nowhere'",
        "PYTHONPATH",
    ),
    (
        "--reward.function rewards:scor",
        "reward.function = 'rewards:scor'",
        "no function 'scor'",
        "did you mean 'score'?",
    ),
    (
        "--reward.function rewards:two",
        "reward.function = 'rewards:two'",
        "line 3: two(a, b)",
        "two(prompt, response, label)",
    ),
    (
        "--reward.function syntax:score",
        "reward.function = 'syntax:score'",
        "cannot be read as Python",
        "line 1",
    ),
    (
        "--loss.name rewards.deep:sapo",
        "loss.name = 'rewards.deep:sapo'",
        "'rewards' is not a package",
        "no module 'deep'",
    ),
    (
        "--run.dir train.jsonl",
        "run.name = train.jsonl/run",
        "train.jsonl is a file",
        "choose another run.dir",
    ),
    (
        "--resume",
        "checkpoint.require = true (--resume)",
        "holds no checkpoint",
        "omit it to start over",
    ),
    (
        "--run.name started --optim.lr 0.5",
        "started/checkpoints/step_000001 was made with other settings",
        "optim.lr: 1e-06 -> 0.5",
        "--checkpoint.allow_changes optim.lr",
    ),
    (
        "--run.name started --run.num_steps 2",
        "run.num_steps = 2",
        "started/checkpoints/step_000001 has 3 finished steps",
        "raise it to at least that",
    ),
    (
        "--run.name damaged",
        "damaged/checkpoints/step_000001/state.json",
        "not the state of a checkpoint",
        "choose another",
    ),
    ("--checkpoint.load none", "checkpoint.load = none", "no such directory", "it must be like"),
    (
        "--from-rollouts runs",
        "--from-rollouts runs",
        "No such file",
        "name a run directory with its config.toml",
    ),
]
TOML = [
    ("[optin]\nlr = 1.0", "[optin]", "unknown section", "did you mean 'optim'?"),
    (
        "[optim]\nwarmup_update = 1",
        "optim.warmup_update = 1",
        "unknown key",
        "did you mean 'warmup_updates'?",
    ),
    ("[optim]\nlr = true", "optim.lr = true", "must be a number", "default, 1e-06"),
    ("[optim]\nlr = 'fast'", "optim.lr = 'fast'", "must be a valid number", "default, 1e-06"),
    ("[parallel]\ntp = 2.5", "parallel.tp = 2.5", "must be a valid integer", "default, 1"),
    (
        "[rollout]\nurls = 'http://a:1'",
        "rollout.urls = 'http://a:1'",
        "must be a list",
        "default, ()",
    ),
    (
        "[eval]\nsets = ['a.jsonl']",
        "eval.sets = ['a.jsonl']",
        "must be a table of names and values",
        "default, {}",
    ),
    ("[optim]\nlr = 1\nlr = 2", "broken.toml", "not valid TOML", "Cannot overwrite a value"),
    ("[run\n", "broken.toml", "not valid TOML", "line 5"),
    ('[eval.sets]\n"" = "held.jsonl"', "eval.sets", "without a name, held.jsonl", "give it a name"),
    ("[[run]]\nseed = 1", "[run]", "must be a section with keys", "got [{'seed': 1}]"),
]
CASES = [*SPELLING, *VALUES, *LAYOUTS, *CONFLICTS, *FILES]


def check_refusal(result: tuple[int, str, str], words: tuple[str, ...]) -> None:
    status, out, message = result
    assert status == 2, message or out
    assert not out, "a configuration that is refused is not printed"
    assert "Traceback" not in message and "pydantic" not in message
    assert not [word for word in words if word not in message], message


def test_the_unbroken_configuration_passes(refuse):
    status, out, message = refuse("--config", "good.toml")
    assert (status, message) == (0, "") and "1 ranks = tp 1" in out
    status, out, _ = refuse(
        "--config", "good.toml", "--model.path", "plan_only", "--reward.function", "rewards:score"
    )
    assert status == 0 and "only config.json is there" in out
    assert "torch_is_not_imported" not in sys.modules
    status, out, message = refuse(
        "--config", "good.toml", "--run.name", "started", "--run.num_steps", "9"
    )
    assert (status, message) == (0, "") and "num_steps = 9" in out
    status, out, message = refuse("--config", "good.toml", "--model.path", "qwen3-30b-a3b")
    assert (status, message) == (0, "") and "--dtype bfloat16" in out, (
        "rollout.dtype = auto, and no checkpoint to ask"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][2:])
def test_command_line_is_refused(refuse, case):
    command, *words = case
    arguments = command.split()
    check_refusal(
        refuse(*([] if "--config" in arguments else ["--config", "good.toml"]), *arguments), words
    )


@pytest.mark.parametrize("case", TOML, ids=lambda case: case[0].replace("\n", " "))
def test_file_is_refused(refuse, here, case):
    text, *words = case
    (here / "broken.toml").write_text((here / "good.toml").read_text() + text)
    check_refusal(refuse("--config", "broken.toml"), words)


def test_what_this_machine_lacks_is_refused(refuse, monkeypatch, tmp_path):
    """A run would find it after its model is loaded, or in its first save."""
    check_refusal(
        refuse("--config", "good.toml", "--run.dir", "/proc/nope"),
        ("run.dir / run.name = /proc/nope/run", "no file can be written"),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refusal(
            refuse(
                "--config",
                "good.toml",
                "--rollout.port",
                str(port - 1),
                "--rollout.num_servers",
                "2",
            ),
            (f"rollout.port = {port}: cannot listen", "in use", "use another port, or 0"),
        )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 10))
    words = (
        "0.00 GiB free in",
        "a checkpoint takes",
        "the rollouts of a step at most",
        "choose another run.dir",
    )
    check_refusal(refuse("--config", "good.toml"), words)
    assert refuse("--config", "good.toml", "--model.path", "plan_only")[0] == 0, (
        "a plan writes nothing"
    )


def test_a_full_disk_that_reports_room_is_refused(refuse, monkeypatch):
    """A quota is not in the free space: only writing shows it."""
    written = []

    def full(descriptor):
        written.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    check_refusal(
        refuse("--config", "good.toml"), ("no file can be written", "quota exceeded", "GiB free")
    )
    assert len(written) == 1 and not Path(written[0]).exists(), "it is removed"


def test_options_of_the_server_are_parsed_by_its_own_parser(refuse, here, monkeypatch):
    pytest.importorskip("sglang")
    words = (
        "rollout.server_args = ['--mem-fractoin', '0.8']: SGLang ",
        "unrecognized arguments: --mem-fractoin 0.8",
    )
    check_refusal(
        refuse("--config", "good.toml", "--rollout.server_args", "--mem-fractoin", "0.8"), words
    )


def test_options_of_a_server_that_is_not_installed_are_not_checked(refuse, here):
    bare = here / "bare_python"
    # without installed packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    options = ("--rollout.python", str(bare), "--rollout.server_args", "--mem-fractoin", "0.8")
    status, out, message = refuse("--config", "good.toml", *options)
    assert (status, message) == (0, "") and "SGLang is not installed for" in out


def test_the_renderer_is_tried_on_the_tokenizer(refuse, here):
    from megatron_rl_tools.tiny_text import make_tokenizer  # imports torch

    make_tokenizer().save_pretrained(here / "chatless")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(here / "moe" / name, here / "chatless" / name)
    (here / "chatless/chat_template.jinja").write_text("{{ messages }}")
    options = (
        "--model.path",
        "chatless",
        "--agent.function",
        "rewards:chat",
        "--agent.renderer",
        "qwen3",
    )
    (here / "rewards.py").write_text(
        (here / "rewards.py").read_text().replace("import torch_is_not_imported\n", "")
    )
    with open(here / "rewards.py", "a") as file:
        file.write("async def chat(session, prompt): ...\n")
    check_refusal(
        refuse("--config", "good.toml", *options),
        ("agent.renderer = 'qwen3'", "must be the format of the model"),
    )


def test_required_keys_are_named(refuse):
    check_refusal(
        refuse(), ("model.path: required", "data.train: required", "as --data.train VALUE")
    )


def test_all_missing_files_and_functions_are_reported_together(refuse):
    words = (
        "data.train = a.jsonl",
        "eval.sets.x = b.jsonl",
        "checkpoint.load = c",
        "reward.function = 'd:e'",
    )
    command = (
        "--config good.toml --data.train a.jsonl --eval.sets x b.jsonl --checkpoint.load c"
        " --reward.function d:e"
    )
    check_refusal(refuse(*command.split()), words)


def test_there_are_at_least_100_distinct_cases():
    assert len(CASES) + len(TOML) >= 100 and len({case[0] for case in CASES}) == len(CASES)


def test_functions_are_found_without_running_their_modules(here):
    """Only the run can check compiled modules, star imports and decorated functions; packages may
    lack __init__.py.
    """
    (here / "names/space").mkdir(parents=True)
    (here / "names/space/own.py").write_text(
        "import this_is_not_there\nif True:\n    def one(a, b, c=3): ...\ntry:\n    two ="
        " print\nexcept E:\n    from x import three as four\ndef rest(*a): ...\ndef named(a, b, *,"
        " c): ...\n@two\ndef given(a, b, c): ...\n"
    )
    (here / "names/space/star.py").write_text("from elsewhere import *\n")
    for name in ("one", "two", "four", "rest", "given"):
        assert problem_of(f"names.space.own:{name}", ("a", "b")) is None, name
    assert problem_of("math:sqrt", ("a", "b")) is None
    assert problem_of("names.space.star:any", ("a",)) is None
    assert "three" in (problem_of("names.space.own:three", ()) or "")
    assert "called as named(a, b)" in (problem_of("names.space.own:named", ("a", "b")) or "")
    assert problem_of("names.space.own:one", ("a",), ("a", "b")) is None
    assert "named(a) or named(a, b)" in (
        problem_of("names.space.own:named", ("a",), ("a", "b")) or ""
    )
    assert "one(a, b, c=3)" in (problem_of("names.space.own:one", ("a",)) or "")


@pytest.mark.parametrize(
    "command", ["--parallel.ep 3", "--reward.function rewards:scor", "--run.num_step 5"]
)
def test_a_refusal_takes_less_than_three_cpu_seconds(here, command):
    """CPU seconds: they do not grow on a busy machine."""
    words = next(words for text, *words in CASES if text == command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "dry-run", "--config", "good.toml",
        *command.split()],
        cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    check_refusal((done.returncode, done.stdout, done.stderr), tuple(words))
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 3
