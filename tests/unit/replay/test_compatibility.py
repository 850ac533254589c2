"""Every refusal of replay/compatibility.py on a real TransformerConfig: named, with its reason;
allowed settings pass.
"""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from megatron_rl.config import load_config
from megatron_rl.engine.model import make_transformer_config
from megatron_rl.models.families import make_spec
from megatron_rl.plan.refusals import check_core
from megatron_rl.replay.compatibility import (
    REFUSALS,
    CoreSettings,
    ReplayIncompatible,
    check_compatibility,
    compatibility_line,
    refusals,
)

HF = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
}
CASES = [  # settings of core, what is said
    (
        {"moe_router_fusion": True},
        "moe_router_fusion = True: the fused router returns before the replay hook",
    ),
    ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor = 0.0: .*dropped"),
    ({"moe_token_dropping": True}, "moe_token_dropping = True: dropped tokens"),
    (
        {"overlap_moe_expert_parallel_comm": True},
        "overlap_moe_expert_parallel_comm = True: combined 1F1B",
    ),
    (
        {"cuda_graph_impl": "local", "cuda_graph_scope": []},
        "cuda_graph_scope = : a captured router",
    ),
    (
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "moe_router"]},
        "cuda_graph_scope = attn,moe_router",
    ),
    (
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Enum("Scope", "moe").moe]},
        "cuda_graph_scope = moe: ",
    ),
    (
        {"moe_router_load_balancing_type": "sinkhorn"},
        "load_balancing_type = sinkhorn: .*no replay hook",
    ),
    (
        {"moe_router_load_balancing_type": ["none", "sinkhorn"]},
        "load_balancing_type = none,sinkhorn",
    ),
    (
        {"moe_router_load_balancing_type": "quantile_balancing"},
        "load_balancing_type = quantile_balancing: .*no replay hook",
    ),
    ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay = True: core's own replay"),
    ({"moe_router_force_load_balancing": True}, "force_load_balancing = True: .*random"),
    ({"moe_input_jitter_eps": 1e-3}, "moe_input_jitter_eps = 0.001: noise"),
    (
        {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3},
        "moe_router_bias_update_rate = 0.001: the expert bias would move",
    ),
    (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-3},
        "moe_aux_loss_coeff = 0.001: .*not the replayed ones",
    ),
    (  # core has a balancing loss by default, this program none
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 1e-2},
        "moe_aux_loss_coeff = 0.01: .*not the replayed ones",
    ),
    (
        {
            "moe_router_load_balancing_type": ["none", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.0, 1e-3],
        },
        r"moe_aux_loss_coeff = 0\.0,0\.001: ",
    ),
    ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff = 0.001: core scales it"),
    (
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2},
        "moe_router_group_topk = 2: core scores a group",
    ),
    (
        {"moe_router_score_function": "sigmoid", "bf16": True, "moe_router_dtype": None},
        "moe_router_dtype = None: megatron-core before 0.17 rounds",
    ),
    (
        {"moe_router_pre_softmax": True, "bf16": True, "moe_router_dtype": None},
        "router_dtype = fp32",
    ),
    (
        {"moe_router_pre_softmax": True, "bf16": False, "fp16": True, "moe_router_dtype": None},
        "router_dtype = fp32",
    ),
    (
        {"moe_router_padding_for_quantization": True},
        "padding_for_quantization = True: core then adds experts",
    ),
    (
        {"moe_token_dispatcher_type": "flex"},
        "moe_token_dispatcher_type = flex: .*use alltoall or allgather",
    ),
    (
        {
            "virtual_pipeline_model_parallel_size": 2,
            "batch_p2p_comm": True,
            "overlap_p2p_comm": True,
        },
        "batch_p2p_comm = True: .*interleaved",
    ),
    (
        {
            "virtual_pipeline_model_parallel_size": 2,
            "variable_seq_lengths": True,
            "overlap_p2p_comm": False,
        },
        "overlap_p2p_comm = False: .*shapes",
    ),
]
FINE = [
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["mlp", "mamba"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "mlp", "mamba"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": [Enum("Scope", "attn").attn]},
    # the best 5 // 2 = 2 of a group
    {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 5},
    {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
    {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_router_topk": 6},
    {"moe_router_score_function": "sigmoid", "bf16": True, "moe_router_dtype": "fp32"},
    {"moe_router_score_function": "softmax", "bf16": True, "moe_router_dtype": None},
    {"mtp_num_layers": 1},
    {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
]


def configuration(**sections):
    sections.setdefault("model", {})["path"] = "x"
    return load_config(None, [], {"data": {"train": "x"}, **sections})


def core_config(cfg, **settings):
    """A real TransformerConfig; settings are set after its own checks, as later changes to it would
    be.
    """
    config = make_transformer_config(make_spec(HF), cfg.model, cfg.parallel, torch.device("cpu"))
    for key, value in settings.items():
        assert hasattr(config, key), f"megatron-core has no setting {key}"
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(("settings", "said"), CASES, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("mode", ["none", "R3"])
def test_refused_with_reason_and_remedy(settings, said, mode):
    core = core_config(configuration(), **settings)
    with pytest.raises(ReplayIncompatible, match=said) as error:
        check_compatibility(core, mode=mode, core_version="0.16.1")
    assert "; " in str(error.value), "no remedy"


def test_every_refusal_has_a_case_of_its_own():
    """Each rule is the only one that its case breaks."""
    broken = set()
    for settings, _ in CASES:
        core = CoreSettings(core_config(configuration(), **settings))
        names = [rule.key for rule in REFUSALS if rule.holds(core, Version("0.16.1"))]
        assert len(names) == 1, (settings, names)
        broken.add(names[0])
    assert broken == {rule.key for rule in REFUSALS}


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_not_refused(settings):
    check_compatibility(core_config(configuration(), **settings), mode="R3", core_version="0.16.1")


@pytest.mark.parametrize("version", ["0.17.0", "0.19.2"])
def test_new_core_keeps_scores_exact(version):
    core = core_config(
        configuration(), moe_router_score_function="sigmoid", bf16=True, moe_router_dtype=None
    )
    check_compatibility(core, mode="R3", core_version=version)


def test_all_problems_are_named_together():
    core = core_config(configuration(), moe_router_fusion=True, moe_input_jitter_eps=0.1)
    with pytest.raises(ReplayIncompatible, match=r"moe_router_fusion.*moe_input_jitter_eps"):
        check_compatibility(core, mode="R2", core_version="0.16.1")


def test_a_model_without_experts_has_nothing_to_replay():
    core = core_config(configuration(), num_moe_experts=None)
    with pytest.raises(
        ReplayIncompatible, match=r"replay\.mode = R3: .*no MoE layer.*set replay\.mode = none"
    ):
        check_compatibility(core, mode="R3", core_version="0.16.1")
    check_compatibility(core, mode="none", core_version="0.16.1")
    with pytest.raises(
        ReplayIncompatible, match=r"replay\.measure = true: .*no MoE layer.*set it to false"
    ):
        check_compatibility(core, mode="none", core_version="0.16.1", measure=True)
    check_compatibility(
        core_config(configuration()), mode="R3", core_version="0.16.1", measure=True
    )


@pytest.mark.parametrize(
    ("sections", "settings", "line"),
    [
        ({}, {}, "replay R3, measured: no model parallelism, recompute none, alltoall, packed"),
        (
            {"model": {"batch_format": "bshd"}},
            {},
            "replay R3, measured: no model parallelism, recompute none, alltoall, padded",
        ),
        (
            {
                "parallel": {"tp": 2, "pp": 2, "vp": 2, "ep": 2, "layers_per_stage": [1, 2, 2, 2]},
                "model": {"recompute": "full"},
                "replay": {"mode": "R3", "measure": False},
            },
            {},
            "replay R3: tp2+sp pp2x2 (layers 1+2+2+2) ep2, recompute full, alltoall, packed",
        ),
        (
            {
                "parallel": {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
                "model": {
                    "recompute": "block",
                    "recompute_layers": 3,
                    "token_dispatcher": "allgather",
                },
                "replay": {"mode": "R2"},
            },
            {"mtp_num_layers": 1},
            "replay R2, measured: tp2+sp cp2 ep4 etp1, recompute block 3, allgather, packed, MTP"
            " layers route live",
        ),
        (
            {"model": {"recompute": "block", "recompute_layers": 1}},
            {},
            "replay R3, measured: no model parallelism, recompute block 1, alltoall, packed",
        ),
        ({"parallel": {"pp": 7}}, {}, "replay R3, measured: pp7, recompute none, alltoall, packed"),
        (
            {"parallel": {"tp": 2, "pp": 2, "layers_per_stage": [3, 4]}},
            {"sequence_parallel": False},
            "replay R3, measured: tp2 pp2 (layers 3+4), recompute none, alltoall, packed",
        ),
    ],
)
def test_the_line_names_what_is_active(sections, settings, line):
    cfg = configuration(**sections)
    assert compatibility_line(cfg, core_config(cfg, **settings)) == line


def test_the_line_names_how_many_layers_are_recomputed_at_a_time_from_two_on():
    for layers, said in ((1, "recompute full,"), (2, "recompute full 2,")):
        cfg = configuration(model={"recompute": "full", "recompute_layers": layers})
        assert said in compatibility_line(cfg, SimpleNamespace())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_router_load_balancing_type": "aux_loss"},
        {"moe_router_score_function": "sigmoid", "moe_router_dtype": None},
        {"bf16": True, "moe_router_dtype": None},
    ],
    ids=str,
)
def test_a_setting_that_a_version_of_core_does_not_have_is_off(settings):
    assert list(refusals(SimpleNamespace(**settings), Version("0.16.1"))) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_router_fusion": True}, "returns before the replay hook"),
        ({"moe_expert_capacity_factor": 1.0}, "beyond an expert's capacity"),
        ({"moe_router_fuson": True}, "did you mean 'moe_router_fusion'"),
        ({"overlap_param_gather": True}, "not gathered yet"),
    ],
)
def test_the_dry_run_refuses_fields_of_core_as_the_engine_does(fields, message):
    """From [megatron]: the same reason before a GPU is rented and at start-up."""
    cfg, spec = configuration(megatron=fields), make_spec(HF)
    with pytest.raises(ValueError, match=message):
        check_core(spec, cfg)
    with pytest.raises(ValueError, match=message):
        core = make_transformer_config(
            spec, cfg.model, cfg.parallel, torch.device("cpu"), cfg.megatron.fields
        )
        check_compatibility(core, mode="R3", core_version="0.16.1")


def test_fields_of_core_reach_its_configuration():
    cfg = configuration(
        model={"recompute": "selective"},
        megatron={"recompute_modules": ["moe", "core_attn"], "moe_permute_fusion": False},
    )
    core = make_transformer_config(
        make_spec(HF), cfg.model, cfg.parallel, torch.device("cpu"), cfg.megatron.fields
    )
    assert core.recompute_modules == ["moe", "core_attn"]
    assert check_core(make_spec(HF), cfg) == []
