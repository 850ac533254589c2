"""One set of refusals: what the planner proposes the dry run accepts, and what the dry run accepts
megatron-core builds.

The model of one rank is built for real, on the meta device, in a job whose other ranks exist in
name only (torch's fake groups).
"""

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from megatron.core import __version__ as core_version
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.config import load_config
from megatron_rl.engine.model import make_model, make_transformer_config, moe_routers
from megatron_rl.engine.optim import make_ddp_config, make_optimizer_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.known import DEEPSEEK_V3, KNOWN, QWEN3_MOE, find_spec
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.grid import place, smallest_world
from megatron_rl.plan.hardware import find_hardware
from megatron_rl.plan.memory import rank_parameters
from megatron_rl.replay.compatibility import check_compatibility
from megatron_rl.replay.manager import ReplayManager
from megatron_rl_tools import plan_layouts

CPU = torch.device("cpu")
QUICK = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=3000, derandomize=False)


# Random models and settings -----------------------------------------------------------------------


@st.composite
def models(draw):
    """config.json of a small model: sizes that layouts often, but not always, divide."""
    layers, heads = draw(st.integers(1, 6)), draw(st.sampled_from([4, 4, 8, 6, 1]))
    common = {
        "num_hidden_layers": layers,
        "hidden_size": draw(st.sampled_from([24, 32, 64])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(
            st.sampled_from([size for size in (1, 2, 4, 6, 8) if heads % size == 0])
        ),
        "intermediate_size": draw(st.sampled_from([48, 96, 96, 50])),
        "vocab_size": draw(st.sampled_from([61, 64, 96])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 1 << 16,
    }
    experts, width = draw(st.sampled_from([8, 8, 12, 2])), draw(st.sampled_from([16, 16, 18]))
    top_k = draw(st.integers(1, 2 if experts == 2 else 4))
    family = draw(st.sampled_from(["qwen3", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3"]))
    if family == "deepseek_v3":
        groups = draw(st.sampled_from([1, 2]))
        return DEEPSEEK_V3 | common | {
            "num_key_value_heads": heads, "q_lora_rank": draw(st.sampled_from([None, 20])),
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
            "n_routed_experts": experts,
            "num_experts_per_tok": top_k, "moe_intermediate_size": width,
            "n_shared_experts": draw(st.integers(0, 2)),
            "first_k_dense_replace": draw(st.integers(0, layers)), "n_group": groups,
            "topk_group": 1,
            "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "rope_theta": 1e4,
        }  # fmt: skip
    qwen = QWEN3_MOE | common | {"head_dim": 16}
    if family == "qwen3":
        moe = (
            "num_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        )
        return {key: value for key, value in qwen.items() if key not in moe} | {
            "architectures": ["Qwen3ForCausalLM"]
        }
    dense = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    qwen |= {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
    qwen["mlp_only_layers"] = sorted(dense)
    if family == "qwen2_moe":
        shared = {
            "shared_expert_intermediate_size": draw(st.sampled_from([40, 40, 41])),
            "norm_topk_prob": False,
        }
        return qwen | shared | {"architectures": ["Qwen2MoeForCausalLM"]}
    if family == "olmoe":
        olmoe = {
            key: value
            for key, value in qwen.items()
            if key not in ("head_dim", "moe_intermediate_size")
        }
        olmoe |= {"architectures": ["OlmoeForCausalLM"], "norm_topk_prob": False, "rope_theta": 1e4}
        return {
            k: v for k, v in olmoe.items() if k not in ("decoder_sparse_step", "mlp_only_layers")
        }
    return qwen


@st.composite
def layouts(draw, layers):
    pp, vp = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 1, 2]))
    sizes = {
        "tp": draw(st.sampled_from([1, 1, 2, 4])),
        "pp": pp,
        "cp": draw(st.sampled_from([1, 1, 2])),
    }
    sizes |= {"ep": draw(st.sampled_from([1, 2, 2, 4, 3])), "vp": vp if pp > 1 else 1}
    sizes["etp"] = draw(st.sampled_from([None, 1, 2, sizes["tp"]]))
    stages = pp * sizes["vp"]
    if layers >= stages and (layers % stages or draw(st.booleans())):
        counts = [layers // stages] * stages
        counts[draw(st.integers(0, stages - 1))] += layers % stages
        sizes["layers_per_stage"] = counts
    if draw(st.integers(0, 9)) == 0:
        sizes["sequence_parallel"] = draw(st.booleans())
    return {key: value for key, value in sizes.items() if value is not None}


MEGATRON = [
    {"recompute_modules": ["moe"]}, {"moe_router_fusion": True}, {"overlap_grad_reduce": True,
    "bucket_size": 64},
    {"deterministic_mode": True}, {"moe_token_dispatcher_type": "allgather"},
    {"moe_shared_expert_overlap": True},
    {"fp8": "e4m3"}, {"attention_dropout": 0.1}, {"qk_layernorm": False}, {"window_size": [8, 0]},
    {"moe_layer_recompute": True},
    {"cuda_graph_impl": "local"}, {"moe_input_jitter_eps": 0.1},
    {"use_precision_aware_optimizer": True},
    {"optimizer_cpu_offload": True}, {"align_param_gather": True},
    {"microbatch_group_size_per_vp_stage": 1},
]  # fmt: skip
"""[megatron] of a run, each as likely as the others."""


@st.composite
def runs(draw):
    """(config.json, sections of the configuration, ranks, the rank to build)."""
    hf = draw(models())
    parallel = draw(layouts(hf["num_hidden_layers"]))
    model = {
        "recompute": draw(st.sampled_from(["none", "full", "block", "selective"])),
        "token_dispatcher": draw(st.sampled_from(["alltoall", "alltoall", "allgather"])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "fused_lm_head": draw(st.booleans()),
        "batch_format": draw(st.sampled_from(["thd", "bshd"])),
        "router_dtype": draw(st.sampled_from(["fp32", "fp64", "model"])),
        "layer_spec": draw(st.sampled_from(["auto", "local"])),
    }
    megatron = draw(st.sampled_from(MEGATRON)) if draw(st.integers(0, 2)) == 0 else {}
    if "recompute_modules" in megatron:
        model["recompute"] = "selective"
    if model["recompute"] in ("full", "block"):
        model["recompute_layers"] = draw(st.integers(1, 3))
    replay = {"mode": draw(st.sampled_from(["none", "R2", "R3"])), "measure": draw(st.booleans())}
    if hf["architectures"] == ["Qwen3ForCausalLM"] and draw(st.integers(0, 3)):
        replay = {"mode": "none", "measure": False}
    sections = {
        "model": model,
        "parallel": parallel,
        "replay": replay,
        "run": {
            "prompts_per_step": 48,
            "group_size": 6,
            "device": draw(st.sampled_from(["cpu", "cuda"])),
        },
        "optim": {"distributed": draw(st.booleans())},
        "rollout": {"urls": ["http://server:30000"]},
        "megatron": megatron,
    }
    return hf, sections, draw(st.integers(1, 2)), draw(st.integers(0, 1 << 20))


# Building one rank --------------------------------------------------------------------------------


@contextlib.contextmanager
def rank_of(world, rank, cfg):
    """megatron-core's groups of one rank, as distributed/groups.py makes them, among ranks that do
    not exist.
    """
    sizes = cfg.parallel
    excepthook = sys.excepthook  # torch wraps it each time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=sizes.vp if sizes.vp > 1 else None,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.expert_tp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        yield SimpleNamespace(
            device=torch.device("meta"),
            vp_size=sizes.vp,
            tp_size=sizes.tp,
            is_first_stage=stage == 0,
            is_last_stage=stage == sizes.pp - 1,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = excepthook


def start(cfg, spec, world, rank):
    """What the start-up does with a layout before it reads weights.

    Raises what it raises.  Returns the built chunks.
    """
    model = cfg.model
    with rank_of(world, rank, cfg) as parallel:
        core = make_transformer_config(spec, model, cfg.parallel, CPU, cfg.megatron.fields)
        check_compatibility(
            core, mode=cfg.replay.mode, measure=cfg.replay.measure, core_version=core_version
        )
        make_ddp_config(cfg, overlap=cfg.overlaps_grad_reduce)
        make_optimizer_config(cfg)
        core.perform_initialization = False
        with torch.device("meta"):
            chunks = make_model(spec, model, core, parallel)
        routers = [(spec.moe_layers.index(layer), router) for layer, router in moe_routers(chunks)]
        ReplayManager(routers, num_experts=spec.num_experts, scores_are_logits=True)
        return chunks


def dry_run_accepts(folder, hf, sections, replicas):
    """(cfg, spec, ranks) of a run that the dry run accepts, else None."""
    (folder / "config.json").write_text(json.dumps(hf))
    sections = sections | {
        "model": {"path": str(folder), **sections["model"]},
        "data": {"train": str(folder / "t.jsonl")},
    }
    try:
        cfg = load_config(None, [], sections)
        world = replicas * smallest_world(cfg.parallel)
        text = report(cfg, world)
    except ValueError:
        return None
    if "as TransformerEngine is not installed here" in text:  # named as not checked
        return None
    return cfg, make_spec(hf), world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned")
    (path / "t.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    return path


def check_runs(folder, options, least):
    accepted = []

    @options
    @given(runs())
    def check(run):
        hf, sections, replicas, rank = run
        if found := dry_run_accepts(folder, hf, sections, replicas):
            cfg, spec, world = found
            chunks = start(cfg, spec, world, rank % world)
            planned = rank_parameters(
                spec, cfg.parallel, place(rank % world, cfg.parallel, world).pp
            )
            assert planned.total == sum(
                weight.numel() for chunk in chunks for weight in chunk.parameters()
            )
            accepted.append(cfg)

    check()
    assert len(accepted) >= least
    assert any(cfg.parallel.tp > 1 for cfg in accepted) and any(
        cfg.parallel.pp > 1 for cfg in accepted
    )


def test_what_the_dry_run_accepts_can_be_built(folder):
    check_runs(folder, QUICK, 30)


@pytest.mark.slow
def test_what_the_dry_run_accepts_can_be_built_long(folder):
    check_runs(folder, LONG, 400)


# The planner --------------------------------------------------------------------------------------


@st.composite
def plans(draw):
    """(arguments of `plan`, rank to build)."""
    model = draw(st.sampled_from(list(KNOWN)))
    gpus = draw(st.sampled_from([8, 8, 16, 64, 512]))
    arguments = [
        "--gpus",
        str(gpus),
        "--model",
        model,
        "--gpu",
        draw(st.sampled_from(["a100", "h100", "h200", "gb200"])),
    ]
    if draw(st.booleans()):
        arguments += [
            "--run.max_tokens_per_micro_batch",
            "16384",
            "--rollout.max_response_tokens",
            "14336",
        ]
    arguments += [
        "--model.layer_spec",
        draw(st.sampled_from(["auto", "transformer_engine", "local"])),
    ]
    arguments += ["--model.fused_lm_head"] if draw(st.booleans()) else []
    arguments += ["--run.prompts_per_step", str(draw(st.sampled_from([64, 256])))]
    arguments += ["--replay.mode", draw(st.sampled_from(["R2", "R3"]))]
    if draw(st.integers(0, 3)) == 0:
        arguments += ["--server-gpus", "64"]
    return arguments, draw(st.integers(0, 1 << 20))


def proposal(arguments):
    """The options that `plan` prints for its first layout and its servers; None where it finds no
    layout.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if plan_layouts.main([*arguments, "--top", "1"]):
            return None
    lines = [line.partition(": ") for line in printed.getvalue().splitlines()]
    found = {
        name: options.split() for name, _, options in lines if name in ("first", "their options")
    }
    servers = found["their options"]
    if servers[0] == "--rollout.urls":  # "and the addresses of N servers"
        servers = [
            "--rollout.urls",
            *(f"http://node:{30000 + number}" for number in range(int(servers[5]))),
        ]
    return found["first"] + servers


def check_plans(options, least):
    accepted = []

    @options
    @given(plans())
    @example((["--gpus", "8", "--model", "qwen3-30b-a3b"], 3))  # one node: servers share the GPUs
    def check(run):
        arguments, rank = run
        options = proposal(arguments)
        if options is None:
            return
        args, overrides = plan_layouts.parse_plan(arguments)
        sections = plan_layouts.PAPER_STEP | {
            "model": {**plan_layouts.PAPER_STEP["model"], "path": args.model}
        }
        cfg = load_config(None, [*overrides, *options, "--run.device", "cuda"], sections)
        text = report(cfg, args.gpus, find_hardware(args.gpu))
        assert "WARNING, more than" not in text
        local = cfg.model_copy(
            update={"model": cfg.model.model_copy(update={"layer_spec": "local"})}
        )
        # TransformerEngine is not installed
        start(local, find_spec(args.model), args.gpus, rank % args.gpus)
        accepted.append(cfg)

    check()
    assert len(accepted) >= least and any(cfg.rollout.release_memory for cfg in accepted)


def test_what_the_planner_proposes_first_is_accepted_and_can_be_built():
    check_plans(settings(QUICK, max_examples=6), 2)


@pytest.mark.slow
def test_what_the_planner_proposes_first_is_accepted_and_can_be_built_long():
    check_plans(settings(LONG, max_examples=300), 100)


def test_the_planner_says_why_it_finds_nothing(capsys):
    assert (
        plan_layouts.main(
            ["--gpus", "512", "--model", "deepseek-v3", "--run.prompts_per_step", "7"]
        )
        == 1
    )
    refused = capsys.readouterr().err
    assert (
        "refused, whatever the memory:\nparallel.cp = 2: latent attention under context parallelism"
        " is not" in refused
    )
    assert "\nrun.prompts_per_step = 7 must be a multiple of" in refused
