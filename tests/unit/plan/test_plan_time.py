"""The step-time model: published sizes, independent computations, and the effect of every setting
on its own part.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

from megatron_rl.config import load_config
from megatron_rl.models.cost import active_parameters, cache_numbers
from megatron_rl.models.fit import core_version
from megatron_rl.models.known import KNOWN, find_spec
from megatron_rl.models.spec import ModelError
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.hardware import HARDWARE, Assumptions, find_hardware, read_assumptions
from megatron_rl.plan.lengths import lengths_of, make_lengths
from megatron_rl.plan.memory import full_model, rank_parameters, trained_parameters
from megatron_rl.plan.server_time import (
    DecodeModel,
    ServerPlan,
    configured_servers,
    propose_servers,
)
from megatron_rl.plan.training_time import TrainingModel
from megatron_rl_tools import plan_layouts
from megatron_rl_tools.plan_layouts import PAPER_STEP
from megatron_rl_tools.plan_layouts import main as plan
from megatron_rl_tools.rehearse.options import parse
from megatron_rl_tools.rehearse.rehearse import prepare

ROOT = Path(__file__).parents[3]
H100 = HARDWARE["h100"]
PERFECT = Assumptions(
    matrices=1, experts=1, attention=1, bandwidth=1, nvlink=1, network=1, fill=1, lockstep=1,
    layer_seconds=1e-15,
    decode_layer_seconds=1e-15, collective_seconds=1e-15,
)  # fmt: skip


PLAIN = {"overlap_grad_reduce": False}


def config(*overrides, **sections):
    step = {
        "run": {"prompts_per_step": 64, "group_size": 16, "max_tokens_per_micro_batch": 36_864},
        "rollout": {"max_response_tokens": 32_768, "urls": ["http://a:1"]},
        "model": {"path": "unused", "layer_spec": "transformer_engine"},
        "data": {"train": "unused"},
    }
    return load_config(
        None,
        list(overrides),
        {key: {**value, **sections.pop(key, {})} for key, value in step.items()} | sections,
    )


@pytest.mark.parametrize(
    ("name", "total", "active"),  # as published: billions
    [
        ("olmoe-1b-7b", 6.92, 1.28),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("kimi-k2", 1026, 32.6),
    ],
)
def test_published_sizes(name, total, active):
    spec = find_spec(name)
    whole = full_model(spec)
    assert (whole.dense + whole.experts) / 1e9 == pytest.approx(total, rel=2e-3)
    embedding = spec.hidden_size * spec.vocab_size  # publishers count it as active
    assert (active_parameters(spec) + embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_models_by_name_or_directory():
    assert find_spec("Qwen3-30B-A3B") == find_spec("qwen3-30b-a3b")
    with pytest.raises(
        ModelError,
        match=r"model qwen3-30b: no such checkpoint directory.*did you mean qwen3-30b-a3b\?",
    ):
        find_spec("qwen3-30b")
    assert set(KNOWN) >= {"qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"}
    assert cache_numbers(find_spec("qwen3-30b-a3b")) == 48 * 2 * 4 * 128
    assert cache_numbers(find_spec("deepseek-v3")) == 61 * (512 + 64), (
        "MLA keeps its latent and one rotated key"
    )


@pytest.mark.parametrize(("mean", "cap"), [(300, 1000), (9830, 32768), (800, 1000), (10, 1000)])
def test_lengths_have_their_stated_mean_and_second_moment(mean, cap):
    lengths = make_lengths(mean, cap)
    drawn = np.minimum(np.random.default_rng(0).exponential(lengths.scale, 400_000), cap)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert (drawn**2).mean() == pytest.approx(lengths.second_moment, rel=0.015)
    assert (drawn > cap / 2).mean() == pytest.approx(lengths.survival(cap / 2), abs=0.003)
    with pytest.raises(ValueError, match="must be above 0 and below the cap"):
        make_lengths(cap, cap)


def test_one_perfect_gpu_takes_the_flops_of_the_paper():
    """At full efficiency, without links: 2 FLOPs per weight and token, 2 W for each of S^2 / 2
    pairs; an update 3 times that.
    """
    spec, cfg = find_spec("qwen3-30b-a3b"), config()
    hardware = replace(H100, bandwidth=1e30)
    tokens = TrainingModel(spec, cfg, 1, hardware, PERFECT).tokens
    flops = (
        tokens.sequences
        * tokens.mean
        * (2 * active_parameters(spec) + 48 * 2 * 32 * 128 * tokens.squared)
    )
    old, update = TrainingModel(spec, cfg, 1, hardware, PERFECT).training()
    assert old.total * hardware.flops == pytest.approx(flops, rel=1e-3)
    assert update.total * hardware.flops == pytest.approx(3 * flops, rel=1e-3)
    again = TrainingModel(
        spec, config(model={"recompute": "full"}), 1, hardware, PERFECT
    ).training()[1]
    head = 2 * spec.hidden_size * spec.vocab_size * tokens.sequences * tokens.mean
    assert again.total * hardware.flops == pytest.approx(4 * flops - head, rel=1e-3), (
        "the head is not recomputed"
    )


def test_each_parallel_axis_costs_time_on_its_own_links():
    spec = find_spec("qwen3-30b-a3b")

    def update(world, **parallel):
        return TrainingModel(
            spec, config(parallel=parallel), world, H100, Assumptions()
        ).training()[1]

    plain, tensor, exchange = update(64), update(64, tp=4, etp=1), update(64, ep=8)
    assert (
        plain.tensor == plain.exchange == plain.context == 0 < min(tensor.tensor, exchange.exchange)
    )
    assert update(64, cp=4).context > 0 == exchange.tensor
    assert update(64, ep=16).exchange > 2 * exchange.exchange, "half of it leaves the node"
    assert exchange.gradients < plain.gradients, "experts have fewer copies"
    assert update(64, pp=4).waiting > plain.waiting
    # a row to its 8 experts and back, over NVLink
    expected = 2 * 8 * 2048 * 2 * 7 / 8 / (450e9 * 0.7)
    trainer = TrainingModel(spec, config(parallel={"ep": 8}), 64, H100, Assumptions())
    assert trainer.layer(1000.0, 1.0, is_moe=True)[0].exchange == pytest.approx(1000 * expected)


@pytest.mark.parametrize("world", [16, 64])
def test_the_reduction_of_gradients_overlaps_backward_but_for_the_embedding(world):
    """On 64 GPUs it takes longer than the backward pass of a micro-batch."""
    spec, sizes = find_spec("qwen3-30b-a3b"), {"tp": 2, "cp": 4, "ep": 8, "etp": 1}
    plain, model = (
        TrainingModel(spec, config(parallel=sizes, megatron=f), world, H100, Assumptions())
        for f in (PLAIN, {})
    )
    before, after = plain.training()[1], model.training()[1]
    share = 151_936 * spec.hidden_size / 2 / rank_parameters(spec, plain.cfg.parallel, 0).total
    hidden = (1 - share) * before.gradients * 4 / (4 + 2)  # parameters are gathered in 16 bits
    forward, both = (model.stages(model.tokens, training=t)[0].total for t in (False, True))
    assert (hidden < both - forward) == (world == 16)
    hidden = min(hidden, both - forward)
    assert after.gradients == pytest.approx(before.gradients - hidden, rel=1e-6)
    assert after.total == pytest.approx(before.total - hidden, rel=1e-6)


def test_with_adapters_their_gradients_alone_are_reduced_and_updated():
    spec = find_spec("qwen3-30b-a3b")

    def gradients(**sections):
        cfg = config(parallel={"ep": 8}, megatron=PLAIN, **sections)
        return TrainingModel(spec, cfg, 64, H100, PERFECT).training()[1], cfg

    (whole, cfg), (adapters, with_lora) = gradients(), gradients(lora={"rank": 8})
    numbers = [trained_parameters(spec, one, 0) for one in (cfg, with_lora)]
    # 64 copies of what is dense, 8 of the experts
    moved = [n.dense * 63 / 64 + n.experts * 7 / 8 for n in numbers]
    ratio = moved[1] / moved[0]
    assert 0 < ratio < 0.1
    assert adapters.gradients == pytest.approx(ratio * whole.gradients, rel=1e-6)
    assert adapters.optimizer < 0.1 * whole.optimizer


def test_without_the_distributed_optimizer_gradients_are_all_reduced():
    """Twice 4 bytes a parameter in place of 4, and 2 for the gathered parameters."""
    spec = find_spec("qwen3-30b-a3b")
    times = [
        TrainingModel(
            spec,
            config(parallel={"ep": 8}, megatron=PLAIN, optim={"distributed": flag}),
            64,
            H100,
            PERFECT,
        ).training()[1]
        for flag in (True, False)
    ]
    assert times[1].gradients == pytest.approx(8 / 6 * times[0].gradients, rel=1e-6)


def test_uneven_stages_wait_for_the_slowest():
    spec = find_spec("qwen3-30b-a3b")
    even, uneven = (
        # the same reduction of gradients: the last stage's is never hidden
        TrainingModel(
            spec, config(parallel=sizes, megatron=PLAIN), 64, H100, Assumptions()
        ).training()[1]
        for sizes in ({"pp": 2}, {"pp": 2, "layers_per_stage": (36, 12)})
    )
    assert uneven.total > 1.25 * even.total


def test_every_further_forward_pass_is_counted():
    spec = find_spec("qwen3-30b-a3b")

    def old_passes(**loss):
        cfg = config(loss=loss, run={"num_mini_batches": 2})
        return TrainingModel(spec, cfg, 64, H100, Assumptions()).training()[0].total

    plain = old_passes(name="gmpo")
    assert (
        old_passes(name="rspo") == pytest.approx(2 * plain) == old_passes(name="gmpo", kl_coef=0.1)
    )
    assert old_passes(name="rspo", kl_coef=0.1) == pytest.approx(3 * plain)


def test_decoding_reads_weights_and_cache():
    spec = find_spec("qwen3-30b-a3b")
    sampler = DecodeModel(spec, ServerPlan(1, 1), H100, PERFECT)
    one = sampler.decode_step(1, 0) * H100.bandwidth
    whole = full_model(spec)
    assert one == pytest.approx(2 * (whole.dense + whole.experts * 8 / 128), rel=1e-3), (
        "one token: its own experts"
    )
    many = sampler.decode_step(10_000, 0)
    assert many == pytest.approx(2 * 10_000 * active_parameters(spec) / H100.flops, rel=1e-3), (
        "compute, in a large batch"
    )
    cache = sampler.decode_step(100, 20_000) - sampler.decode_step(100, 0)
    assert cache * H100.bandwidth == pytest.approx(100 * 20_000 * 2 * cache_numbers(spec), rel=1e-3)
    twice = DecodeModel(spec, ServerPlan(1, 2), replace(H100, nvlink=1e30), PERFECT)
    assert twice.decode_step(100, 20_000) == pytest.approx(
        sampler.decode_step(100, 20_000) / 2, rel=1e-3
    )


def test_slots_are_limited_by_memory_and_the_command_line():
    spec, cfg, assumed = find_spec("qwen3-30b-a3b"), config(), Assumptions()
    roomy = DecodeModel(spec, ServerPlan(4, 8), H100, assumed).sample(cfg)
    assert roomy.slots == 256 and roomy.full == 0, "1,024 responses on four servers, all concurrent"
    tight = DecodeModel(spec, ServerPlan(4, 2), H100, assumed).sample(cfg)
    assert tight.slots < 256 and tight.full > 0 and tight.total > roomy.total
    assert (
        DecodeModel(spec, ServerPlan(4, 8, max_running=10), H100, assumed).sample(cfg).slots == 10
    )
    with pytest.raises(
        ValueError, match=r"room for 0 tokens beside the weights.*give a server more GPUs"
    ):
        DecodeModel(find_spec("deepseek-v3"), ServerPlan(1, 8), H100, assumed).sample(cfg)
    assert propose_servers(spec, 64, H100, assumed, "--gpus") == ServerPlan(32, 2)
    assert propose_servers(find_spec("kimi-k2"), 256, H100, assumed, "--gpus").devices == 64
    with pytest.raises(ValueError, match="give --gpus 64 or more, or a smaller model"):
        propose_servers(find_spec("kimi-k2"), 32, H100, assumed, "--gpus")
    args = ["--tp-size=4", "--mem-fraction-static", "0.7"]
    own = config(rollout={"urls": [], "num_servers": 2, "server_args": args})
    servers = configured_servers(spec, own, H100, assumed)
    assert servers == ServerPlan(
        2, 4, own.rollout.max_running_requests, own.rollout.max_total_tokens, 0.7
    )
    unlimited = DecodeModel(spec, replace(servers, max_tokens=None), H100, assumed)
    assert unlimited.static_bytes() == pytest.approx(0.7 * H100.memory)
    small = DecodeModel(spec, servers, H100, assumed)
    assert small.static_bytes() == pytest.approx(
        small.weight_bytes() + own.rollout.max_total_tokens * small.cache_bytes()
    )


@pytest.mark.parametrize("slots", [1024, 256, 64])
def test_sampling_takes_what_a_simulation_takes(slots):
    """Continuous batching, response by response: a slot whose response ends takes the next; 64
    tokens at a time.
    """
    spec, assumed, cfg = find_spec("qwen3-30b-a3b"), Assumptions(), config()
    lengths = lengths_of(cfg, assumed)
    sampler = DecodeModel(
        spec, ServerPlan(1, 8, max_running=slots), replace(H100, memory=1e15), assumed
    )
    found = sampler.sample(cfg)
    assert found.slots == slots and (found.full == 0) == (slots == 1024)
    drawn = np.minimum(
        np.random.default_rng(1).exponential(lengths.scale, 1024), lengths.cap
    ).tolist()
    left, age, seconds = np.array(drawn[:slots]), np.zeros(slots), 0.0
    waiting = drawn[slots:]
    prompt = assumed.mean_prompt * cfg.data.max_prompt_tokens
    while len(left):
        seconds += 64 * sampler.decode_step(len(left), prompt + age.mean())
        left, age = left - 64, age + 64
        for index in np.flatnonzero(left <= 0)[: len(waiting)]:
            left[index], age[index] = waiting.pop(), 0.0
        left, age = left[left > 0], age[left > 0]
    assert found.full + found.tail == pytest.approx(seconds, rel=0.05)


def test_weight_sync_sends_every_byte_while_other_sources_prepare_theirs():
    spec = find_spec("qwen3-30b-a3b")
    assumed = replace(PERFECT, tensor_seconds=1e-15, server_tensor_seconds=1e-15)
    size = 2 * full_model(spec).dense + 2 * full_model(spec).experts

    def seconds(world=8, assumed=assumed, rollout=None, **parallel):
        return TrainingModel(
            spec, config(parallel=parallel, rollout=rollout or {}), world, H100, assumed
        ).weight_sync()

    memory = H100.bandwidth
    assert seconds() == pytest.approx(size / memory + size / 50e9), (
        "one source, without sharded tensors"
    )
    assert seconds(tp=4, etp=4) == pytest.approx(size / 450e9 + size / 50e9), (
        "one source gathers, then sends"
    )
    many = {"weight_sync_sources": 16}
    assert seconds(pp=4, ep=2, rollout=many) == pytest.approx(size / 50e9), (
        "seven others send while one prepares"
    )
    assert seconds(rollout={"weight_sync": "disk"}) == pytest.approx(size / memory + 2 * size / 2e9)
    few = {"weight_sync_sources": 2}
    moved = 0.75 * size / 450e9 + size / memory
    assert seconds(pp=4, ep=2, rollout=few) == pytest.approx(
        size / 50e9 + max(0, moved / 2 - size / 50e9 / 2)
    )
    colocated = seconds(pp=4, ep=2, rollout={"weight_sync": "colocated", "urls": ()})
    assert colocated == pytest.approx(2 * size / memory + 7 / 8 * size / 450e9), (
        "rank 0 alone, to which others send theirs"
    )
    lora = {"rank": 16, "targets": ["attention"]}
    cfg = config(rollout={"weight_sync": "adapter", "verify_push": "version"}, lora=lora)
    model = TrainingModel(spec, cfg, 8, H100, assumed)
    # A and B of q, k, v and o: 32 and 4 heads of 128
    per_layer = 16 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    assert model.sync_bytes == 2 * 48 * per_layer < 0.01 * size
    assert model.weight_sync() == pytest.approx(model.sync_bytes / 50e9)
    slow = replace(assumed, tensor_seconds=1.0)
    tensors = 48 * (3 * 128 + 12)
    assert seconds(pp=4, ep=2, assumed=slow, rollout=many) == pytest.approx(
        tensors / 8 + size / memory / 8 + size / 50e9 / 8
    )
    slow = replace(assumed, server_tensor_seconds=1.0)
    assert seconds(pp=4, ep=2, assumed=slow, rollout=many) == pytest.approx(tensors + size / 50e9)


def test_overlapped_steps_take_the_longer_half():
    spec, server_pool = find_spec("qwen3-30b-a3b"), ServerPlan(8, 8)
    plain = TrainingModel(spec, config(), 64, H100, Assumptions()).step(server_pool)
    ahead = TrainingModel(spec, config(rollout={"max_staleness": 1}), 64, H100, Assumptions()).step(
        server_pool
    )
    assert plain.total == pytest.approx(
        plain.rollout.total + plain.old_logprob.total + plain.update.total + plain.weight_sync
    )
    assert ahead.total == pytest.approx(plain.total - plain.old_logprob.total - plain.update.total)


def test_assumptions_and_hardware_by_name():
    assert read_assumptions(["matrices=0.3", "disk=1e9"]) == replace(
        Assumptions(), matrices=0.3, disk=1e9
    )
    with pytest.raises(
        ValueError, match=r"no assumption is called 'matrixes'; did you mean 'matrices'\?"
    ):
        read_assumptions(["matrixes=0.3"])
    for value in ("", "x", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="the value must be a number > 0"):
            read_assumptions([f"matrices={value}"])
    assert find_hardware("H200") is HARDWARE["h200"]
    with pytest.raises(ValueError, match=r"--gpu h1000: unknown hardware; did you mean 'h100'\?"):
        find_hardware("h1000")
    for name, row in HARDWARE.items():
        assert name == "cpu" or (
            row.flops > 1e14
            and row.network < row.nvlink < row.bandwidth
            and math.isfinite(row.memory)
        )


def test_a_cpu_has_no_reserve_and_one_of_all_memory_is_refused(tmp_path, capsys):
    sizes = dict(KNOWN["qwen3-30b-a3b"]) | {
        "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 1024, "num_experts": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = ["--gpus", "2", "--gpu", "cpu", "--model", str(tmp_path)]
    step = ["--run.max_tokens_per_micro_batch", "1024", "--rollout.max_response_tokens", "512",
            "--data.max_prompt_tokens", "512"]  # fmt: skip
    assert plan([*options, *step]) == 0, capsys.readouterr().err
    assert "layouts fit in 8.00 GiB" in capsys.readouterr().out
    assert plan([*options, *step, "--reserve-gib", "8"]) == 2
    assert "--reserve-gib 8: it must be below the 8 GiB of CPU" in capsys.readouterr().err


def test_the_planner_ranks_by_seconds_and_refuses_bad_arguments(capsys):
    assert plan(["--gpus", "64", "--model", "qwen3-30b-a3b", "--top", "5"]) == 0
    out = capsys.readouterr().out
    rows = [
        line.split() for line in out.splitlines() if "GiB" in line and line.lstrip()[0].isdigit()
    ]
    seconds = [float(row[-4]) + float(row[-2]) for row in rows]
    assert len(rows) == 5 and max(seconds[:3]) <= 1.05 * min(seconds)
    assert "layouts fit" in out and "first: --parallel.tp" in out and "servers: 32 x 2 GPUs" in out
    assert plan(["--gpus", "64", "--model", "qwen3-30b-a3b", "--gpu-gib", "12"]) == 1
    assert plan(["--gpus", "64", "--model", "qwen9"]) == 2
    assert "no such checkpoint directory" in capsys.readouterr().err
    assert plan(["--gpus", "16", "--model", "deepseek-v3"]) == 2
    assert "a server takes 64; give --server-gpus 64 or more" in capsys.readouterr().err
    for options in (["--gpus", "0"], ["--gpu-gib", "0"], ["--gpu-gib", "nan"],
                    ["--reserve-gib", "inf"]):  # fmt: skip
        with pytest.raises(SystemExit):
            plan(["--gpus", "8", "--model", "qwen3-30b-a3b", *options])
        assert f"argument {options[0]}: must be a " in capsys.readouterr().err


def planned(capsys, *options):
    """(seconds, concurrent requests, servers, their KV cache) that `plan` prints for its first
    layout, and the options that it proposes.
    """
    assert plan(["--gpus", "8", "--model", "qwen3-30b-a3b", "--top", "1", *options]) == 0
    out = capsys.readouterr().out
    lines = dict(re.findall(r"^(first|servers|their options): (.+)$", out, re.M))
    seconds = float(re.search(r"; (\d+) s in all", out)[1])
    slots = int(re.search(r"(\d+) concurrent", lines["servers"])[1])
    cache = int(re.search(r"max_total_tokens (\d+)", lines["their options"])[1])
    proposed = [*lines["first"].split(), *lines["their options"].split()]
    return (seconds, slots, lines["servers"].partition(" GPUs")[0], cache), proposed


SHARED = (
    "--rollout.gpus", *"01234567", "--rollout.weight_sync", "colocated", "--rollout.release_memory",
    "--rollout.max_server_restarts", "0", "--rollout.max_total_tokens", "100000",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "slots", "servers"),
    [
        ((), 64, "4 x 2"),
        (("--rollout.max_running_requests", "9"), 9, "4 x 2"),
        (
            ("--rollout.num_servers", "1", "--rollout.max_running_requests", "8", *SHARED),
            8,
            "1 x 8",
        ),
        # the KV cache limits them
        (("--rollout.num_servers", "2", *SHARED), 11, "2 x 4"),
    ],
)
def test_the_plans_seconds_are_those_of_its_dry_run(options, slots, servers, capsys):
    """The servers are those that the configuration names, or those that the plan proposes."""
    (seconds, *printed), proposed = planned(capsys, *options)
    assert printed[:2] == [slots, servers]
    sections = PAPER_STEP | {"model": {**PAPER_STEP["model"], "path": "qwen3-30b-a3b"}}
    cfg = load_config(None, [*options, *proposed], sections)
    text = report(cfg, 8)
    assert float(re.search(r"a step +([\d.]+) s", text)[1]) == pytest.approx(seconds, abs=0.6)
    assert f"up to {slots} concurrent requests" in text


def test_the_plans_servers_have_the_memory_of_its_gpus(capsys):
    """--gpu-gib is the memory of all GPUs, those of servers too."""
    (_, _, servers, cache), _ = planned(capsys, "--gpu-gib", "120")
    (_, _, more, larger), _ = planned(capsys, "--gpu-gib", "140")
    token = 48 * 2 * 4 * 128 * 2 / 2  # bytes on each of a server's two GPUs
    assert (servers, more) == ("4 x 2", "4 x 2")
    assert larger - cache == pytest.approx(
        20 * 2**30 * Assumptions().server_memory / token, abs=1024
    )


PAGES = "".join((ROOT / page).read_text() for page in ("docs/guides/layout.md", "results/plans.md"))
GUIDE = re.findall(r"^```\n\$ megatron-rl plan (.+)\n((?:.+\n)+)```", PAGES, re.MULTILINE)


def test_the_layout_guide_plans_every_known_model():
    assert len(GUIDE) == 7
    for model in ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"):
        assert any(f"--model {model} " in command for command, _ in GUIDE)


@pytest.mark.parametrize(("command", "printed"), GUIDE, ids=[command for command, _ in GUIDE])
def test_the_layout_guide_shows_what_the_planner_prints(command, printed, capsys):
    assert plan(command.split()) == 0
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    # newer versions compute layouts that 0.16 gets wrong, so more of them fit
    if core_version() >= Version("0.17"):
        found[0], printed = (
            re.sub(r"\d+ layouts fit", "layouts fit", text) for text in (found[0], printed)
        )
    assert found == printed.splitlines()


def test_the_memory_of_a_plan_is_that_of_its_rehearsals(monkeypatch, tmp_path):
    options = []

    def rehearse(configs, passed, out):
        options.extend(passed)
        return []

    monkeypatch.setattr(plan_layouts, "rehearse_all", rehearse)
    model = "qwen3-30b-a3b"
    assert plan(["--gpus", "64", "--model", model, "--gpu-gib", "120", "--rehearse"]) == 0
    config = tmp_path / "config.toml"
    config.write_text('[data]\ntrain = "x"\n[model]\npath = "x"\n[run]\nprompts_per_step = 64\n')
    args, _ = parse(["--config", str(config), *options])
    job = prepare(args, [], tmp_path)
    assert job.hardware.memory == 120 * 2**30 != HARDWARE["h100"].memory
    assert job.hardware.name == HARDWARE["h100"].name
