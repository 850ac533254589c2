"""Host memory of a node's ranks, and of a rank's GPU: what is where."""

from dataclasses import replace

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.cost import active_parameters
from megatron_rl.models.known import find_spec
from megatron_rl.plan import memory
from megatron_rl.plan.activations import (
    attention_numbers,
    buffer_bytes,
    head_gradient_bytes,
    layer_bytes,
    logits_bytes,
)
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.hardware import GIB, HARDWARE, Assumptions, Rates, read_assumptions
from megatron_rl.plan.host_memory import REMEDIES, HostBytes, check_host_memory, host_bytes
from megatron_rl.plan.lengths import lengths_of
from megatron_rl.plan.phases import fullest, phases
from megatron_rl.plan.report_sections import server_lines, time_lines
from megatron_rl.plan.search import Search
from megatron_rl.plan.server_time import DecodeModel, ServerPlan, score_seconds
from megatron_rl.plan.training_time import TrainingModel

SPEC = find_spec("qwen3-30b-a3b")
H100 = HARDWARE["h100"]


def config(*overrides, **sections):
    base = {
        "model": {"path": "qwen3-30b-a3b", "recompute": "full"},
        "data": {"train": "x", "max_prompt_tokens": 2048},
        "run": {"device": "cuda", "max_tokens_per_micro_batch": 36_864},
        "rollout": {"urls": ["http://a:1"], "max_response_tokens": 32_768},
        "parallel": {"tp": 2, "cp": 4, "ep": 8, "etp": 1},
    }
    return load_config(None, list(overrides), base | sections)


def test_the_longest_sequence_fits_although_it_exceeds_a_micro_batch():
    """A sequence above the cap is a micro-batch by itself (batch/balance.py)."""
    cap = "--run.max_tokens_per_micro_batch"
    small, whole = config(cap, "4096"), config(cap, str(2048 + 32_768))
    assert fullest(SPEC, small, 8, Assumptions()) == fullest(SPEC, whole, 8, Assumptions())
    lines = report(small, 8)
    assert "at most about 128 micro-batches of 34,816 rows on every replica" in lines
    # evaluation is not trained on, but an agent's sequences have one limit in both
    more = ("--eval.max_response_tokens", "40000")
    assert config(*more).longest_sequence == 34_816
    assert config(*more, "--agent.function", "a:b").longest_sequence == 42_048


def test_the_kl_reference_takes_host_memory_and_none_of_the_gpu():
    plain, with_kl = config(), config("--loss.kl_coef", "0.001")
    on_gpu = memory.rank_memory(SPEC, plain, 8, 0)
    assert memory.rank_memory(SPEC, with_kl, 8, 0) == on_gpu
    without, on_host = host_bytes(SPEC, plain, 8, 8), host_bytes(SPEC, with_kl, 8, 8)
    # the reference, and the place of the weights during its pass
    assert on_host == replace(without, reference=2 * on_gpu.weights) and without.reference == 0
    assert f"8 ranks x (reference {2 * on_gpu.weights / 2**30:.2f} + routes" in report(with_kl, 8)


def test_a_teacher_of_top_k_tokens_takes_host_memory():
    teacher = {"teachers": {"big": {"urls": ["http://b:1"]}}, "advantage": {"weight": 0.0}}
    none = host_bytes(SPEC, config(), 8, 8)
    sampled = config().run.prompts_per_step * config().run.group_size * 32_768
    token = config(**teacher)
    # one float32 for every sampled token; all ranks are one replica
    assert host_bytes(SPEC, token, 8, 8) == replace(none, teacher=sampled * 4 // 8)
    top = config("--loss.teacher_form", "forward", "--loss.teacher_top_k", "16", **teacher)
    # a size of 2 bytes, and 16 ids of at most 3 bytes with a float32 each
    assert host_bytes(SPEC, top, 8, 8) == replace(none, teacher=sampled * (4 + 2 + 16 * 7) // 8)
    text = report(top, 8)
    assert f"scores at most {sampled:,} sampled tokens a step, 118 bytes each" in text
    assert f" + teacher {sampled * 118 // 8 / GIB:.2f} + " in text


def test_the_report_has_the_command_of_a_teacher_that_the_run_serves():
    teacher = {"big": {"path": "qwen3-235b-a22b", "gpus": [*range(8, 16)]}}
    cfg = config(teachers=teacher, advantage={"weight": 0.0})
    text = "\n".join(server_lines(SPEC, cfg, Assumptions()))
    assert "teacher big of all of data.train, started by the run: " in text
    with pytest.raises(ValueError, match="the host of rank 0 has GPUs 0 to 7, not 8, 9, 10"):
        report(cfg, 8)
    assert "--model-path qwen3-235b-a22b" in text and "--tp-size 8" in text


def test_the_report_has_the_seconds_of_a_teacher_that_the_run_serves():
    def lines(gpus, group_size=8):
        teacher = {"big": {"path": "qwen3-235b-a22b", "gpus": gpus}}
        urls = [f"http://a:{number}" for number in range(1, group_size)]
        rollout = {"urls": urls, "max_response_tokens": 32_768}
        size = ("--run.group_size", str(group_size))
        cfg = config(*size, teachers=teacher, advantage={"weight": 0.0}, rollout=rollout)
        trainer = TrainingModel(SPEC, cfg, 8, H100, Assumptions())
        return [line for line in time_lines(trainer) if "teacher" in line]

    cfg, teacher = config(), find_spec("qwen3-235b-a22b")
    seconds = score_seconds(cfg, teacher, 8, H100, Assumptions())
    assert score_seconds(cfg, teacher, 4, H100, Assumptions()) == 2 * seconds
    # 22 billion active parameters, two FLOPs each; the prompts count once per group
    sampled = cfg.run.prompts_per_step * cfg.run.group_size * lengths_of(cfg, Assumptions()).mean
    prompts = cfg.run.prompts_per_step * Assumptions().mean_prompt * 2048
    flops = 2 * active_parameters(teacher) * (sampled + prompts)
    assert seconds == pytest.approx(flops / 8 / Rates(H100, Assumptions()).matrices)
    assert lines([*range(8, 16)]) == [
        f"teacher      {seconds:8.1f} s: big on 8 devices scores all prompts and responses, while"
        " others are sampled"
    ]
    few = lines([8], group_size=64)
    assert "on 1 device scores" in few[0] and few[1].startswith("WARNING      teacher big takes ")


def test_teachers_in_turns_count_as_the_largest_and_their_seconds_to_the_step():
    gpus = [*range(8)]
    table = {"path": "qwen3-30b-a3b", "gpus": gpus, "release_memory": True}
    rollout = {
        "gpus": gpus, "weight_sync": "colocated", "release_memory": True, "max_server_restarts": 0,
        "max_response_tokens": 32_768, "max_total_tokens": 65_536, "num_servers": 4,
    }  # fmt: skip
    alone = config(rollout=rollout)
    sources = [{"name": name, "path": "x"} for name in "ab"]
    teachers = {name: table | {"sources": [name]} for name in "ab"}
    teachers["b"]["path"] = "qwen3-235b-a22b"
    cfg = config(rollout=rollout, teachers=teachers, data={"train": sources})
    left, assumed = int(2.0 * GIB), Assumptions()

    def sizes(cfg):
        return {phase.name: phase for phase in phases(SPEC, cfg, 8, H100, assumed, 1)}

    before, after = sizes(alone), sizes(cfg)
    for name, phase in before.items():
        # two more processes that keep some memory
        assert after[name] == replace(phase, servers=phase.servers + 2 * left)
    assert set(after) - set(before) == {"scoring by teacher a", "scoring by teacher b"}
    model = DecodeModel(find_spec("qwen3-235b-a22b"), ServerPlan(1, 8), H100, assumed)
    cache = int(model.weight_bytes() + cfg.rollout.max_total_tokens * model.cache_bytes())
    phase = after["scoring by teacher b"]
    assert (phase.trainer, phase.servers, phase.exact) == (left, cache + 3 * left, cache)
    few = config(rollout=rollout, teachers={"b": teachers["b"] | {"gpus": [0], "sources": []}})
    with pytest.raises(ValueError, match=r"scoring by teacher b: .*: give it more of teachers.b"):
        report(few, 8)
    text = report(cfg, 8)
    assert "its weights wait in host memory while it does not score" in text
    assert text.count("scores all prompts and responses, when all are sampled") == 2
    specs = [find_spec(teacher["path"]) for teacher in teachers.values()]
    seconds = sum(score_seconds(cfg, spec, 8, H100, assumed) for spec in specs)
    assert step_seconds(cfg) == pytest.approx(step_seconds(alone) + seconds, abs=0.2)


def step_seconds(cfg):
    trainer = TrainingModel(SPEC, cfg, 8, H100, Assumptions())
    (line,) = [line for line in time_lines(trainer) if line.startswith("a step")]
    return float(line.split()[2])


def test_the_host_has_routes_a_save_and_what_is_offloaded():
    cfg = config("--replay.mode", "none", "--replay.measure", "false")
    share = memory.checkpoint_bytes_of_rank(SPEC, cfg, 8, 0)
    assert host_bytes(SPEC, cfg, 8, 8) == HostBytes(0, 0, 0, share, 0, 0)
    tokens = config().run.prompts_per_step * config().run.group_size * (2048 + 32_768)
    # 1 byte for each of 8 experts in 48 layers; all ranks are one replica
    assert host_bytes(SPEC, config(), 8, 8).routes == tokens * 48 * 8 // 8
    released = config(
        rollout={
            "weight_sync": "colocated",
            "release_memory": True,
            "gpus": list(range(8)),
            "max_server_restarts": 0,
            "max_response_tokens": 32_768,
        }
    )
    on_gpu = memory.rank_memory(SPEC, released, 8, 0)
    assert host_bytes(SPEC, released, 8, 8).offload == on_gpu.weights + on_gpu.optimizer
    stages = config(parallel={"pp": 2, "layers_per_stage": (1, 47), "ep": 8, "etp": 1})
    assert host_bytes(SPEC, stages, 16, 8).checkpoint == memory.checkpoint_bytes_of_rank(
        SPEC, stages, 16, 1
    ), "of the rank that needs most"


def test_a_node_without_the_host_memory_is_refused_where_its_memory_is_known():
    cfg = config("--loss.kl_coef", "0.001")
    rank = host_bytes(SPEC, cfg, 8, 8)
    fits = replace(H100, host_memory=8.0 * rank.total)
    assert "host memory of a node: 8 ranks x " in report(cfg, 8, fits)
    lacks = replace(H100, host_memory=8.0 * rank.total - 1)
    with pytest.raises(
        ValueError, match=r"^host memory of a node: 8 ranks x \(reference .* \+ routes"
    ):
        report(cfg, 8, lacks)
    check_host_memory(rank, 8, replace(H100, host_memory=0.0))
    for name, remedy in (
        ("reference", "loss.kl_coef = 0"), ("routes", "run.prompts_per_step"),
        ("checkpoint", "optim.distributed"), ("adam", "optimizer_cpu_offload = false"),
        ("offload", "rollout.release_memory = false"),
    ):  # fmt: skip
        one = HostBytes(**dict.fromkeys(REMEDIES, 1))
        with pytest.raises(ValueError, match=remedy):
            check_host_memory(replace(one, **{name: 2}), 1, replace(H100, host_memory=5.0))


def test_experts_with_more_rows_than_the_mean_take_more_memory():
    """Rows of the experts: dispatched (h), gate, up and their product (3 f).

    Beside them, received rows, the output and that in the order of the ranks; permuted rows are
    those of the rank's tokens.
    """
    cfg = config()
    rows = 36_864 // 4 // 2
    routed = rows * 8 * (2048 + 3 * 768) * 2
    even = memory.rank_memory(SPEC, cfg, 8, 0)
    uneven = fullest(SPEC, cfg, 8, read_assumptions(["skew=8"]))
    layer, more = (layer_bytes(SPEC, cfg, is_moe=True, skew=skew) for skew in (1.0, 8.0))
    assert more.kept - layer.kept == more.experts - layer.experts == 7 * routed
    assert even == fullest(SPEC, cfg, 8, Assumptions())
    hidden = rows * 2048 * 2
    assert layer.passing == (1 + 8 * 4) * hidden
    assert more.passing == (1 + 8 * (1 + 3 * 8)) * hidden
    stays = memory.WORKSPACE + 2 * hidden  # with gathered rows of the LM head
    assert uneven.working == more.kept + more.passing + stays
    assert uneven.activations == even.activations
    kept = config(model={"path": "qwen3-30b-a3b"})
    more_kept = memory.rank_memory(SPEC, kept, 8, 0, skew=3.0)
    assert more_kept.activations - memory.rank_memory(SPEC, kept, 8, 0).activations == (
        48 * 2 * routed
    )
    assert report(cfg, 8) != report(cfg, 8, None, read_assumptions(["skew=8"]))


def test_tensor_ranks_of_an_expert_exchange_rows_in_the_dtype_of_the_router():
    """etp = 2: sums of the experts' output and their scattered half are in float32."""
    one, two = (
        layer_bytes(SPEC, config("--parallel.ep", "4", "--parallel.etp", etp), is_moe=True)
        for etp in ("1", "2")
    )
    rows = 36_864 // 4 // 2 * 8 * 2048 * 2
    assert two.passing - one.passing == (2 + 2 * (2 + 1)) * rows
    narrow = ("--parallel.ep", "4", "--parallel.etp", "2", "--model.router_dtype", "model")
    found = layer_bytes(SPEC, config(*narrow), is_moe=True)
    assert found.passing - one.passing == (2 + 1) * rows


def test_a_stage_keeps_its_outputs_of_the_micro_batches_in_flight():
    """A recomputed layer keeps its input, and core the output that it sent."""
    cfg = config("--parallel.pp", "2")
    kept, _ = memory.activation_bytes(SPEC, cfg, 0)
    last, _ = memory.activation_bytes(SPEC, cfg, 1)
    hidden = 36_864 // 4 // 2 * 2048 * 2
    assert (kept, last) == (2 * (24 + 1) * hidden, 24 * hidden)


def test_latent_attention_keeps_keys_and_queries_of_its_heads_alone():
    spec = find_spec("deepseek-v3")
    heads = 128 // 8 * 2 * (128 + 64 + 128)
    assert attention_numbers(spec, 8, 8) == heads + 2 * (1536 + 512 + 64) // 8


def test_the_gradient_of_the_head_is_beside_the_logits():
    def head(*overrides, **fields):
        return head_gradient_bytes(SPEC, config(*overrides, megatron=fields))

    plain = head()
    assert plain == 151_936 // 2 * 2048 * 2
    logits = logits_bytes(SPEC, config())
    hidden = 36_864 // 4 * 2048 * 2
    working = memory.rank_memory(SPEC, config(), 8, 0).working
    # the final norm's input and output, gathered rows and the gradient of all rows
    assert working == logits + plain + 2 * (hidden // 2) + 2 * hidden + memory.WORKSPACE
    fusion = {"gradient_accumulation_fusion": True}
    assert head(**fusion) == 0
    # a gradient that nothing reads stays for every shape of weights
    stays = (buffer_bytes(SPEC, config(megatron=m), is_last=True) for m in ({}, fusion))
    assert next(stays) - hidden == 0 and next(stays) > hidden + plain
    fused = ("--model.fused_lm_head", "true")
    assert head(*fused) == plain and head(*fused, overlap_grad_reduce=False) == 0


def test_an_adapter_of_the_head_reads_its_gradient():
    """The frozen head of other adapters has none; a fused one is summed in float32."""
    table = 151_936 // 2 * 2048

    def memory_of(targets, *overrides, stage=1):
        lora = {"rank": 16, "targets": ["attention", *targets]}
        cfg = config(*overrides, lora=lora, parallel={"tp": 2, "pp": 2})
        sizes = memory.trained_parameters(SPEC, cfg, stage), head_gradient_bytes(SPEC, cfg)
        return *sizes, memory.rank_memory(SPEC, cfg, 8, stage)

    plain, none, before = memory_of([])
    trained, gradient, after = memory_of(["lm_head"])
    assert (none, gradient) == (0, 2 * table)
    assert memory_of(["lm_head"], "--model.fused_lm_head", "true")[1] == 6 * table
    assert trained.dense - plain.dense == 16 * (151_936 // 2 + 2048)
    # W', and two float32 terms of the sum, in the place of an attention weight's
    assert 9 * table < after.working - before.working < 10 * table
    assert memory_of(["embedding"])[0] == plain
    first = memory_of([], stage=0)[0], memory_of(["embedding"], stage=0)[0]
    assert first[1].dense - first[0].dense == 16 * (151_936 // 2 + 2048)


def test_a_shared_pair_is_counted_once_on_every_rank():
    """Gate and up [2 * 768, 2048], down [2048, 768], of 48 layers; whole, or split by etp = tp."""
    for etp, rows, columns in ((1, 1536 + 2048, 2048 + 768), (2, 768 + 2048, 2048 + 384)):
        lora = {"rank": 16, "targets": ["experts"], "shared_pairs": True}
        cfg = config(lora=lora, parallel={"tp": 2, "ep": 4, "etp": etp})
        trained = memory.trained_parameters(SPEC, cfg, 0)
        assert (trained.dense, trained.experts) == (48 * 16 * (rows + columns), 0)
        each = config(lora=lora | {"shared_pairs": False}, parallel={"tp": 2, "ep": 4, "etp": etp})
        of_each = memory.trained_parameters(SPEC, each, 0)
        assert (of_each.dense, of_each.experts) == (0, 32 * trained.dense)


def test_a_layout_with_the_fused_head_comes_before_more_recompute():
    """At a limit between both, the search fuses the head; Adam's float32 copies count as well."""
    cfg = config(model={"path": "qwen3-30b-a3b"})
    trainer = TrainingModel(SPEC, cfg, 8, H100, Assumptions())
    fused = cfg.model_copy(update={"model": cfg.model.model_copy(update={"fused_lm_head": True})})
    plain, small = (fullest(SPEC, c, 8, Assumptions()).total for c in (cfg, fused))
    assert small < plain

    def found(limit, **fields):
        start = config(model={"path": "qwen3-30b-a3b"}, megatron=fields)
        layouts = Search(replace(trainer, cfg=start), limit).candidates
        return next(c.cfg.model for c in layouts if c.cfg.parallel == cfg.parallel)

    model = found((plain + small) / 2)
    assert (model.recompute, model.fused_lm_head) == ("none", True)
    assert not found(plain).fused_lm_head
    narrow = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    with pytest.raises(StopIteration):  # it fits without the copies
        found(60 * GIB, use_precision_aware_optimizer=True, **narrow)


def test_adam_on_the_host_takes_the_time_of_its_bytes():
    """8 bytes per parameter over the link, 28 bytes of the ranks of the node through its memory."""
    fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    plain, offloaded = (
        TrainingModel(SPEC, config(megatron=f), 8, H100, Assumptions()) for f in ({}, fields)
    )
    parameters = memory.rank_parameters(SPEC, plain.cfg.parallel, 0)
    owned = memory.updated_parameters(parameters, plain.cfg, 8)
    seconds = 8 * owned / 2 / (64e9 * 0.75) + 8 * 28 * owned / 2 / (614e9 * 0.75)
    more = offloaded.update(plain.tokens).total - plain.update(plain.tokens).total
    assert more == pytest.approx(seconds, rel=1e-3)
