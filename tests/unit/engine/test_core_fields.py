"""[megatron]: names and types of megatron-core's own fields, read from its classes."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ConfigError
from megatron_rl.engine.core_fields import (
    ELSEWHERE,
    KINDS,
    check_fields,
    field_types,
    fields_of,
    untested,
)

OURS = {"num_layers": 4, "hidden_size": 64, "moe_permute_fusion": False, "bf16": True}


@pytest.mark.parametrize(
    ("name", "given", "kind", "expected"),
    [
        ("moe_permute_fusion", "true", TransformerConfig, True),
        ("recompute_modules", "moe core_attn", TransformerConfig, ["moe", "core_attn"]),
        ("recompute_modules", ["moe"], TransformerConfig, ["moe"]),
        ("attention_backend", "flash", TransformerConfig, AttnBackend.flash),
        ("bucket_size", "4000", DistributedDataParallelConfig, 4000),
        ("overlap_grad_reduce", True, DistributedDataParallelConfig, True),
        ("main_grads_dtype", "bfloat16", OptimizerConfig, torch.bfloat16),
        ("optimizer_offload_fraction", "0.5", OptimizerConfig, 0.5),
    ],
)
def test_values_take_the_type_of_the_field(name, given, kind, expected):
    check_fields({name: given}, OURS)
    assert fields_of(kind, {name: given}) == {name: expected}
    assert type(fields_of(kind, {name: given})[name]) is type(expected)


def test_a_name_of_two_configurations_sets_both():
    shared = sorted(
        field_types(DistributedDataParallelConfig).keys() & field_types(OptimizerConfig).keys()
    )
    assert "use_distributed_optimizer" in shared  # set by optim.distributed; the others are free
    values = {"reuse_grad_buf_for_mxfp8_param_ag": True}
    if values.keys() <= set(shared):
        assert (
            fields_of(DistributedDataParallelConfig, values)
            == fields_of(OptimizerConfig, values)
            == values
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"moe_permute_fuson": True},
            r"megatron\.moe_permute_fuson = True: .* did you mean 'moe_permute_fusion'\?",
        ),
        (
            {"num_layers": 3},
            r"megatron\.num_layers = 3: is fixed here or comes from the checkpoint's config\.json;"
            r" remove it",
        ),
        ({"tensor_model_parallel_size": 2}, r"set parallel\.tp instead"),
        (
            {"overlap_param_gather": True},
            r"would read weights that are not gathered yet; remove it",
        ),
        (
            {"num_layers_in_last_pipeline_stage": 1},
            r"set parallel\.layers_per_stage instead",
        ),
        ({"linear_attention_freq": 2}, "another model than the checkpoint's"),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, "every micro-batch"),
        ({"bf16": True}, r"set model\.dtype instead"),
        ({"lr": 1e-3}, r"set optim\.lr instead"),
        ({"bucket_size": "x"}, r"megatron\.bucket_size = 'x': must be a valid integer"),
        ({"cuda_graph_impl": 5}, r"must be 'none'"),
        ({"main_grads_dtype": "float33"}, r"must be a torch dtype"),
        ({"attention_backend": "slow"}, r"must be flash or "),
        ({"init_method": "x"}, r"its type cannot be written in a configuration file"),
    ],
)
def test_what_cannot_be_set_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        check_fields(values, OURS)


@pytest.mark.parametrize("name", ["q_lora_rank", "cache_mla_latents", "qk_pos_emb_head_dim"])
def test_what_only_latent_attention_reads_is_refused_without_it(name):
    value = {"q_lora_rank": 64, "qk_pos_emb_head_dim": 64}.get(name, True)
    check_fields({name: value}, OURS, is_mla=True)
    with pytest.raises(
        ConfigError,
        match=f"megatron.{name} = {value}: only latent attention reads it, which this checkpoint",
    ):
        check_fields({name: value}, OURS, is_mla=False)
    check_fields({"moe_permute_fusion": True, "bucket_size": 4000}, OURS, is_mla=False)


def test_every_problem_is_named():
    with pytest.raises(ConfigError) as refused:
        check_fields({"moe_permute_fuson": True, "lr": 1, "bucket_size": 3}, OURS)
    assert len(str(refused.value).splitlines()) == 2


def test_fields_of_the_table_exist():
    """A field that core renames must not become free to set."""
    known = set().union(*map(field_types, KINDS))
    assert not {name for names in ELSEWHERE.values() for name in names} - known


def test_untested_are_the_fields_that_reach_the_forward():
    assert untested({"cuda_graph_impl": "local", "bucket_size": 7, "moe_permute_fusion": True}) == [
        "cuda_graph_impl"
    ]
