"""The dry run, compared with megatron-core's rank order and with the parameters that the weight
mapping puts on each rank.
"""

import itertools
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_rl.config import ConfigError, ModelConfig, ParallelConfig, load_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.fit import check_fit, check_sizes
from megatron_rl.models.known import find_spec
from megatron_rl.models.spec import ModelError
from megatron_rl.plan import grid, memory
from megatron_rl.plan.activations import head_bytes
from megatron_rl.plan.dry_run import model_spec, report
from megatron_rl.plan.hardware import HARDWARE, Assumptions
from megatron_rl.plan.phases import phases, update_copies
from megatron_rl.plan.search import Search
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl.weights.hf.entries import entries, shard_shape
from tests.families import FAMILIES, family_checkpoint
from tests.tiny import random_checkpoint

ROOT = Path(__file__).parents[3]
LAYOUTS = [
    {}, {"tp": 2}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}, {"pp": 3},
    {"pp": 2, "tp": 2, "ep": 2, "etp": 1, "layers_per_stage": (1, 2)},
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1}, 32),
        ({"tp": 4, "pp": 3, "ep": 2, "etp": 2}, 24),
        ({"cp": 4, "ep": 8}, 16),
        ({"tp": 2, "ep": 2}, 8),
    ],
)
def test_coordinates_are_those_of_megatron(sizes, world):
    parallel = ParallelConfig(**sizes)
    places = [grid.place(rank, parallel, world) for rank in range(world)]
    dp, copies = grid.dp_size(parallel, world), grid.expert_dp_size(parallel, world)
    dense = RankGenerator(
        tp=parallel.tp, ep=1, dp=dp, pp=parallel.pp, cp=parallel.cp, order="tp-cp-ep-dp-pp"
    )
    expert = RankGenerator(
        tp=parallel.expert_tp,
        ep=parallel.ep,
        dp=copies,
        pp=parallel.pp,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    for generator, axes in (
        (dense, {"tp": "tp", "cp": "cp", "dp": "replica", "pp": "pp"}),
        (expert, {"tp": "etp", "ep": "ep", "dp": "expert_replica", "pp": "pp"}),
    ):
        for axis, name in axes.items():
            for group in generator.get_ranks(axis):
                assert [getattr(places[rank], name) for rank in group] == list(range(len(group))), (
                    axis,
                    group,
                )
                others = [other for other in axes.values() if other != name]
                for other in others:
                    assert len({getattr(places[rank], other) for rank in group}) == 1, (axis, group)
    assert world % grid.smallest_world(parallel) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_every_rank_are_those_of_the_weight_mapping(name, tmp_path):
    path = family_checkpoint(tmp_path, name)
    spec = make_spec(json.loads((path / "config.json").read_text()))
    for sizes in LAYOUTS:
        parallel = ParallelConfig(**sizes)
        try:
            check_fit(spec, ModelConfig(path=path), parallel)
        except ModelError:
            continue
        for te, pp_rank in itertools.product((False, True), range(parallel.pp)):
            layers = grid.rank_layers(spec, parallel, pp_rank)
            dense = experts = 0
            for entry in entries(spec):
                is_here = (
                    entry.layer in layers
                    if entry.layer is not None
                    else on_stage(entry.name, pp_rank, parallel.pp)
                )
                if not is_here or "expert_bias" in entry.name:  # a buffer
                    continue
                if te and entry.rule.te_kind:
                    entry = replace(entry, rule=replace(entry.rule, kind=entry.rule.te_kind))
                if entry.expert is not None:
                    is_mine = entry.expert < spec.num_experts // parallel.ep
                    experts += math.prod(shard_shape(entry, parallel.expert_tp)) * is_mine
                else:
                    dense += math.prod(shard_shape(entry, parallel.tp))
            if spec.tie_embeddings and parallel.pp > 1 and pp_rank == parallel.pp - 1:
                dense += math.prod(
                    shard_shape(next(iter(entries(spec))), parallel.tp)
                )  # the head's copy of the embedding
            found = memory.rank_parameters(spec, parallel, pp_rank, te=te)
            assert found == memory.Parameters(dense, experts), (sizes, pp_rank, te)


def on_stage(name: str, pp_rank: int, pp_size: int) -> bool:
    return pp_rank == (0 if name.startswith("embedding") else pp_size - 1)


@pytest.fixture
def config(tmp_path):
    path = random_checkpoint(tmp_path / "moe", max_position_embeddings=4096)
    (path / "tokenizer_config.json").write_text('{"chat_template": "any"}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    sections = {"model": {"path": str(path)}, "data": {"train": str(tmp_path / "train.jsonl")}}

    def make(*overrides, recompute="none", fused_lm_head=False, **more):
        model = {**sections["model"], "recompute": recompute, "fused_lm_head": fused_lm_head}
        return load_config(None, list(overrides), {**sections, **more, "model": model})

    return make


def test_report_reads_back_as_the_configuration(config, tmp_path):
    cfg = config("--parallel.pp", "2", "--replay.mode", "R3")
    text = report(cfg, 4)
    (tmp_path / "again.toml").write_text(text)
    assert load_config(tmp_path / "again.toml", []) == cfg
    said = text.split("# Model")[1]
    for words in (
        "4 ranks = tp 1 x cp 1 x dp 2 x pp 2",
        "16 prompts x 8 responses = 128 responses, 64 on each of 2 data-parallel replicas",
        "old-logprob: replays them", "--enable-return-routed-experts", "expert ids: at most",
        "Step time, computed for H100-SXM", "servers x devices: 1 x 1",
        "KV cache 8.00 MiB for 16,384 tokens (0.5 KiB each)",
    ):  # fmt: skip
        assert words in said


def test_one_is_not_written_as_several(config):
    one = (
        "--run.num_steps",
        "1",
        "--run.num_mini_batches",
        "1",
        "--run.prompts_per_step",
        "1",
        "--rollout.urls",
        "http://a:1",
    )
    said = report(config(*one), 1)
    assert (
        "all on one data-parallel replica\n" in said and "1 update of 8; 1 step, 1 update\n" in said
    )
    several = report(config("--run.num_steps", "2000", "--run.num_mini_batches", "2"), 1)
    assert "2 updates of 64; 2,000 steps, 4,000 updates\n" in several


def test_the_queue_of_what_is_sampled_ahead_is_reported(config):
    """3 steps of 16 prompts on 2 replicas; 16 bytes of a token beside one per layer and expert that
    it chose.
    """
    ahead = ("--rollout.max_staleness", "2", "--run.num_steps", "9", "--rollout.max_concurrency")
    cfg = config(*ahead, "24")
    spec = model_spec(cfg.model)
    per_token = 16 + len(spec.moe_layers) * spec.top_k * cfg.needs_routes
    size = 3 * 16 * 8 * (cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens) * per_token
    line = next(line for line in report(cfg, 2).splitlines() if "sampled ahead" in line)
    assert (
        f"at most 24 prompts of each replica, {size / 2 / 2**20:.2f} MiB" in line
        and "all are requested" in line
    )
    assert "at most 23 are requested at a time" in report(config(*ahead, "23"), 2)
    assert "sampled ahead" not in report(config(), 2)


@pytest.mark.parametrize("recipe", ["on_policy", "off_policy_n4_r3"])
def test_a_recipe_is_planned_without_its_files(recipe):
    urls = [f"http://node{node}:30000" for node in range(5, 9)]
    path = Path(__file__).parents[3] / f"examples/qwen3_30b_a3b/{recipe}.toml"
    said = report(load_config(path, ["--model.path", "qwen3-30b-a3b", "--rollout.urls", *urls]), 32)
    for words in (
        "30.53 G parameters",
        "32 ranks = tp",
        "servers x devices: 4 x 2",
        "published sizes, to plan with",
        "no file was checked",
    ):
        assert words in said
    with pytest.raises(ValueError, match="no such folder"):
        report(load_config(path, ["--model.path", "qwen3-31b-a3b"]), 32)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_nodes_that_cannot_reach_the_servers_of_a_run_are_refused(config, monkeypatch, host):
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    keys = ("--run.device", "cpu", "--rollout.host", host)
    cfg = config(*keys, "--rollout.api_key_env", "KEY_OF_THE_SERVERS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "4 ranks" in report(cfg, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"no rollout\.urls, with 4 ranks, 2 of them.* rank 3, w"):
        report(cfg, 4)
    # the other node has only later pipeline stages, which get their rollouts from rank 0's node
    staged = config(*keys, "--rollout.api_key_env", "KEY_OF_THE_SERVERS", "--parallel.pp", "2")
    assert "4 ranks" in report(staged, 4)
    assert "4 ranks" in report(cfg, 4, has_servers=False)
    assert "4 ranks" in report(config("--run.device", "cpu", "--rollout.urls", "http://a:1"), 4)


def test_servers_of_a_published_model_have_its_dtype_not_that_of_the_training():
    values = ("--model.path", "qwen3-30b-a3b", "--run.device", "cpu", "--model.dtype", "float32")
    said = report(load_config(None, ["--data.train", "x", *values]), 1)
    assert "--dtype bfloat16" in said and "--dtype float32" not in said


def test_too_few_servers_are_a_warning():
    path = Path(__file__).parents[3] / "examples/qwen3_30b_a3b/on_policy.toml"

    def planned(num_servers):
        urls = [f"http://node:{30000 + number}" for number in range(num_servers)]
        return report(
            load_config(path, ["--model.path", "qwen3-30b-a3b", "--rollout.urls", *urls]), 16
        )

    assert (
        "times as long as training: 2 server device(s) for 16 ranks; raise rollout.num_servers"
        in planned(1)
    )
    assert "WARNING" not in planned(64)


def test_times_are_those_of_the_hardware_and_the_assumptions(config):
    def seconds(*given):
        text = report(config(), 4, *given)
        lines = [
            line.split()
            for line in text.splitlines()
            if line.startswith(("#   update   ", "#   weight sync"))
        ]
        return {stage: figure for _, stage, *figure in lines}

    h100, slow = seconds(HARDWARE["h100"]), seconds(HARDWARE["cpu"])
    assert h100 == seconds() and set(h100) == {"update", "weight"}
    assert h100["update"][1] == "ms:" and slow["update"][1] == "s:"
    kernels = seconds(HARDWARE["h100"], Assumptions(layer_seconds=3e-3))
    assert kernels["update"] != h100["update"] and kernels["weight"] == h100["weight"]
    no_room = report(
        config(rollout={"server_args": ["--tp=2"]}),
        4,
        replace(HARDWARE["h100"], memory=1e5),
        Assumptions(),
    )
    assert (
        "rollout      cannot be computed: servers of 2 x H100-SXM have room for 0 tokens" in no_room
    )


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (
            ["--parallel.ep", "3"],
            None,
            r"parallel\.ep = 3 must divide the model's number of experts",
        ),
        (
            ["--parallel.tp", "2"],
            3,
            r"parallel\.tp x pp x cp = 2 x 1 x 1 = 2 must divide the number of ranks, 3",
        ),
        (["--run.prompts_per_step", "6"], 4, r"run\.prompts_per_step = 6 must be a multiple of 4"),
        (["--data.train", "nowhere.jsonl"], None, r"no such file: data\.train = nowhere\.jsonl"),
        (
            ["--rollout.python", "/no/python"],
            None,
            r"rollout\.python = /no/python: no such program",
        ),
        (["--model.path", "nowhere"], None, r"model\.path = nowhere: no such folder"),
    ],
)
def test_configurations_that_cannot_run_are_refused(config, overrides, world, words):
    with pytest.raises(ValueError, match=words):
        report(config(*overrides), world)


def test_servers_on_gpus_of_the_ranks_are_refused(config, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"rollout\.gpus = \[\]: servers would use GPU 0"):
        report(config("--run.device", "cuda"), 4)
    monkeypatch.setenv("KEY_OF_THE_SERVERS", "sesame")
    four_to_seven = (
        "--run.device", "cuda", "--rollout.gpus", "4", "5", "6", "7", "--rollout.host", "10.0.0.1",
        "--rollout.api_key_env", "KEY_OF_THE_SERVERS",
    )  # fmt: skip
    assert "--tp-size 4" in report(config(*four_to_seven), 4)
    with pytest.raises(ValueError, match="GPU 4, 5, 6, 7"):
        report(config(*four_to_seven), 16)  # eight ranks on each host
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert "16 ranks" in report(config(*four_to_seven), 16)
    with pytest.raises(ValueError, match=r"server_args = .*NCCL_NVLS_ENABLE = 1"):
        report(config(*four_to_seven, "--rollout.server_args=--enable-nccl-nvls"), 16)
    # only a broadcast makes one communicator of both
    disk = ("--rollout.weight_sync=disk", "--rollout.server_args=--enable-nccl-nvls")
    assert "16 ranks" in report(config(*four_to_seven, *disk), 16)
    text = report(config(), 4)
    assert "run.device = auto: refused on a machine with GPUs: rollout.gpus = []" in text, (
        "it may have no GPU"
    )
    assert "refused" not in report(config("--run.device", "cpu"), 4)
    assert report(config("--run.device", "cuda"), 4, has_servers=False)


def test_memory_saving_settings_save_memory(config):
    def total(world=8, **sections):
        cfg = config(**sections)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return memory.rank_memory(spec, cfg, world, 0)

    plain, whole, part = total(), total(recompute="full"), total(recompute="selective")
    assert whole.activations < part.activations < plain.activations
    assert total(parallel={"ep": 2}).weights < plain.weights
    # the gain of model.fused_lm_head: logits of this model are smaller than a chunk of rows
    cfg = load_config(None, ["--data.train", "x"], {"model": {"path": "qwen3-30b-a3b"}})
    fused = cfg.model_copy(update={"model": cfg.model.model_copy(update={"fused_lm_head": True})})
    sizes = [head_bytes(find_spec("qwen3-30b-a3b"), c) for c in (fused, cfg)]
    assert sizes[0] < sizes[1]
    assert total(16).optimizer < plain.optimizer < total(optim={"distributed": False}).optimizer


def test_the_router_shift_keeps_a_float_per_expert_of_every_mini_batch(config):
    """Per id of a mini-batch: 1 byte for R3, and 1 + 4 bytes of each mini-batch of the step."""

    def found(*overrides):
        cfg = config("--run.num_mini_batches", "4", *overrides)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return memory.device_route_bytes(spec, cfg, 4, 0), cfg.run.num_mini_batches

    (plain, num), (shifted, _) = found(), found("--loss.name", "rspo")
    assert plain > 0 and shifted == plain * (1 + 5 * num)
    neither = ("--replay.mode", "none", "--replay.measure", "false")
    assert found(*neither)[0] == 0 and found(*neither, "--loss.name", "rspo")[0] == plain * 5 * num


def test_r2_keeps_the_recorded_ids_of_all_mini_batches_of_a_step(config):
    """Trainer.old_logprobs records those of every mini-batch before the first update."""

    def planned(mode, mini_batches):
        cfg = config("--replay.mode", mode, "--run.num_mini_batches", str(mini_batches))
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return memory.rank_memory(spec, cfg, 4, 0).routes

    # a mini-batch has a quarter of the step's rows
    assert planned("R3", 4) * 4 == planned("R3", 1)
    assert planned("R2", 4) == planned("R2", 1) == planned("R3", 1) > 0


def test_what_was_recorded_stays_during_the_update_of_adam(config):
    """Beside float32 copies, which Adam makes of states in 16 bits."""
    aware = (
        "--model.layer_spec", "transformer_engine", "--model.dtype", "bfloat16",
        "--megatron.use_precision_aware_optimizer", "true",
        "--megatron.exp_avg_dtype", "bfloat16", "--megatron.exp_avg_sq_dtype", "bfloat16",
    )  # fmt: skip

    def planned(*overrides):
        cfg = config(*overrides)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return update_copies(spec, cfg, 4), memory.rank_memory(spec, cfg, 4, 0).routes

    (plain, _), (with_r2, routes) = planned(*aware), planned(*aware, "--replay.mode", "R2")
    assert with_r2 == plain + routes > plain > 0
    assert planned("--replay.mode", "R2")[0] == 0


@pytest.mark.parametrize(
    ("layout", "world", "copies"),
    [
        ({"tp": 2, "cp": 4}, 8, 1),
        ({"tp": 2, "cp": 4}, 32, 1),  # a replica a node
        ({"tp": 2}, 16, 4),
        ({}, 2, 2),  # fewer ranks than a node has
        ({"tp": 2, "pp": 2}, 16, 4),  # both stages of a replica are on different nodes
        ({"tp": 2, "pp": 2}, 8, 2),
        ({"tp": 4, "cp": 3}, 24, 2),  # the second node has the end of one and half of the next
    ],
)
def test_a_node_has_one_copy_of_the_routes_of_each_replica_there(layout, world, copies):
    shared, private = (ParallelConfig(**layout, share_host_memory=share) for share in (True, False))
    assert memory.route_copies(shared, world, per_node=8) == copies
    assert memory.route_copies(private, world, per_node=8) == min(world, 8)


def test_the_report_says_how_many_bytes_of_routes_a_node_has(config):
    text = report(config("--parallel.tp", "2", "--replay.mode", "R3"), 4)
    (line,) = (line for line in text.splitlines() if "expert ids: at most" in line)
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB", line)]
    assert "MiB for each replica there" in line and sizes[0] == pytest.approx(
        2 * sizes[1], rel=0.01
    )
    text = report(config("--parallel.tp", "2", "--parallel.share_host_memory", "false"), 4)
    (line,) = (line for line in text.splitlines() if "expert ids: at most" in line)
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB", line)]
    assert "MiB for each rank there" in line and sizes[0] == pytest.approx(4 * sizes[1], rel=0.01)


def test_a_checkpoint_is_written_in_equal_shares(config):
    """bf16: the weights, their float32 copy and two moments, each value by one rank."""

    def share(world, *overrides, **sections):
        cfg = config(*overrides, **sections)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return memory.checkpoint_bytes_of_rank(spec, cfg, world, 0), memory.full_model(spec).total

    bf16 = ("--model.dtype", "bfloat16")
    one, total = share(1, *bf16)
    assert one == 14 * total and share(8, *bf16)[0] == pytest.approx(one / 8, rel=1e-3)
    assert share(8, *bf16, parallel={"ep": 4})[0] == pytest.approx(one / 8, rel=1e-3)
    assert share(1, "--model.dtype", "float32", optim={"distributed": True})[0] == 16 * total
    assert share(1, "--model.dtype", "float32", optim={"distributed": False})[0] == 12 * total
    assert "saving a checkpoint: " in report(config(*bf16), 4, has_servers=False)


def test_a_save_needs_the_state_and_the_servers_but_no_activations(config):
    def found(*overrides, shared=1):
        cfg = config("--model.dtype", "bfloat16", *overrides)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        each = {
            phase.name: phase
            for phase in phases(spec, cfg, 4, HARDWARE["h100"], Assumptions(), shared)
        }
        return each, memory.rank_memory(spec, cfg, 4, 0)

    beside, rank = found()
    save, training = beside["saving a checkpoint"], beside["training beside servers"]
    assert save.servers == training.servers > 0
    assert save.trainer == rank.weights + rank.gradients + rank.optimizer < training.trainer
    assert found("--loss.kl_coef", "0.1")[0] == beside, "the reference is on the host"
    for options, shared in ((("--rollout.urls", "http://a:1"), 1), ((), 0)):
        assert found(*options, shared=shared)[0]["saving a checkpoint"].servers == 0
    text = report(config("--run.device", "cuda", "--rollout.urls", "http://a:1"), 4)
    assert "saving a checkpoint: " in text.split("Memory of a GPU by phase")[1]


def test_float32_is_planned_with_the_layers_it_runs_on(config):
    """Without TransformerEngine, which computes it in TF32."""

    def activations(*overrides):
        cfg = config("--model.dtype", "float32", *overrides)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        return memory.rank_memory(spec, cfg, 8, 0).activations

    assert activations() == activations("--model.layer_spec", "local")


def test_no_torch_is_imported(config, tmp_path):
    (tmp_path / "run.toml").write_text(report(config(), 1))
    code = (
        "import sys; sys.argv[1:] = ['dry-run', '--config', sys.argv[1]]\nimport runpy\ntry:"
        " runpy.run_module('megatron_rl.cli', run_name='__main__')\nexcept SystemExit as done:"
        " print(done.code, {'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("0 set()\n"), done.stdout + done.stderr
    print(f"a dry run took {time.monotonic() - start:.1f} s")


def test_proposed_layouts_fit_and_the_first_is_the_fastest(config):
    cfg = config("--rollout.urls", "http://node:30000")
    spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
    trainer = TrainingModel(spec, cfg, 16, HARDWARE["h100"], Assumptions())
    roomy = Search(trainer, 1 << 40).candidates
    seconds = [each.old_logprob.total + each.update.total for each in roomy]
    assert seconds[0] <= 1.1 * min(seconds) and max(seconds) > 2 * seconds[0]
    best = roomy[0].cfg.parallel
    assert (
        best.tp * best.cp <= 8
        and best.expert_tp * best.ep <= 8
        and roomy[0].cfg.model.recompute == "none"
    )
    needs = sorted(each.memory.total for each in roomy)
    tight = Search(trainer, needs[0]).candidates
    assert tight and all(each.memory.total <= needs[0] for each in tight)
    assert not Search(trainer, 1000).candidates
    for each in roomy:
        check_sizes(each.cfg.parallel, 16)
        check_fit(spec, cfg.model, each.cfg.parallel)


def test_adam_on_the_host_or_in_fewer_bits_is_counted(config):
    """Bytes of a parameter that one rank updates, with bfloat16 weights: device, host, saved."""

    def counted(world=1, **fields):
        values = [item for name in fields for item in (f"--megatron.{name}", str(fields[name]))]
        cfg = config("--model.dtype", "bfloat16", "--rollout.urls", "http://a:1", *values)
        spec = make_spec(json.loads((cfg.model.path / "config.json").read_text()))
        rank, total = memory.rank_memory(spec, cfg, world, 0), memory.full_model(spec).total
        sizes = (
            rank.optimizer,
            memory.host_optimizer_bytes(spec, cfg, world, 0),
            memory.checkpoint_bytes_of_rank(spec, cfg, world, 0) - 2 * total,
        )
        return [size / total for size in sizes], rank.gradients / total, report(cfg, world)

    offload, few = {"optimizer_cpu_offload": "true"}, {"use_precision_aware_optimizer": "true"}
    half = offload | {"optimizer_offload_fraction": 0.5}
    assert counted()[:2] == ([12, 0, 12], 4)
    # core keeps float32 weights on the device, unless the state is precision-aware
    assert counted(**offload, optimizer_offload_fraction=1)[:2] == ([4, 16, 12], 4)
    assert counted(**half)[:2] == ([8, 8, 12], 4)
    assert counted(**half, **few)[:2] == ([6, 8, 12], 4)
    # the low bits of float32 weights, and moments
    assert counted(**few)[:2] == ([10, 0, 10], 4)
    assert counted(**few, store_param_remainders="false")[:2] == ([12, 0, 12], 4)
    moments = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    assert counted(**few, **moments, main_grads_dtype="bfloat16")[:2] == ([6, 0, 6], 2)
    assert "Adam's update: " in counted(**few, **moments)[2]
    plain, offloaded = counted()[2], counted(**half)[2]
    assert "Adam's update: " not in plain + offloaded and "optimizer_cpu_offload" not in plain
    assert re.search(r"host memory of a node: .*adam \d", offloaded)
