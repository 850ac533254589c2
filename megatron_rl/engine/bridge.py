"""model.provider = bridge: Megatron-Bridge builds, loads and exports the model (AutoBridge ->
provider -> model).

Bridge's provider is itself a TransformerConfig with what Bridge reads from the checkpoint.  The
settings that this program chooses for every model (engine.model.run_settings) replace its own.
With TransformerEngine and a GPU the layers are TransformerEngine's, else those of te_layers.py,
under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import SafetensorError

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.bridge_package import VERSION, first_line, open_package
from megatron_rl.engine.core_fields import (
    CORE_ERRORS,
    check_fields,
    fields_of,
    named_settings,
    reason_of,
)
from megatron_rl.engine.model import (
    LATENT_EPS,
    core_settings,
    run_settings,
    uses_transformer_engine,
)
from megatron_rl.models.fit import check_fit
from megatron_rl.models.spec import (
    ModelError,
    ModelSpec,
    RouterKind,
    load_hf_config,
    padded_vocab_size,
)
from megatron_rl.weights.hf.export import HFStream, HFTensor, with_pairs_together
from megatron_rl.weights.hf.files import CheckpointError, is_left_out, listed, outline, read_headers

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider


class BridgeProvider:
    """The ModelProvider that uses Megatron-Bridge's tables (see engine/provider.py)."""

    def __init__(
        self,
        model: ModelConfig,
        sizes: ParallelConfig,
        parallel: Parallel,
        fields: Mapping[str, object],
    ) -> None:
        te = uses_transformer_engine(model, parallel.device)
        self.model, self.parallel = model, parallel
        self.bridge = open_bridge(model.path, te=te)
        self.core_config = make_provider_of(self.bridge, model.path)
        self.spec = spec_of(self.core_config, self.bridge)
        check_fit(self.spec, model, sizes)
        check_fields(
            fields, core_settings(self.spec, model, sizes, parallel.device), is_mla=self.spec.is_mla
        )
        settings = run_settings(self.spec, model, sizes, parallel.device) | OVERRIDES
        if te:  # keep Bridge's choice of fusions; run_settings turns them off without TE
            settings = {name: value for name, value in settings.items() if name not in FUSIONS}
        users = fields_of(type(self.core_config), fields)
        for name, value in (settings | users).items():
            setattr(self.core_config, name, value)
        # tensors with a row per token of the vocabulary, from which export cuts Bridge's padding
        self._vocabulary = {
            name
            for name, header in read_headers(model.path).items()
            if header.shape[:1] == (self.spec.vocab_size,)
        }
        try:
            self.core_config.finalize()
        except CORE_ERRORS as error:
            names = ("model.provider = bridge", named_settings(users, fields))
            raise ModelError(
                f"{', '.join(filter(None, names))}: megatron-core refuses these settings for"
                f" {self.spec.architecture}: {first_line(reason_of(error))}; change [parallel] or"
                " [megatron]"
            ) from error
        # Bridge's provider reads the process groups of its layers here
        self.core_config._pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    def build(self) -> list[GPTModel]:
        """Build the chunks of this pipeline stage; raise ModelError where Bridge cannot."""
        parallel, chunks = self.parallel, []
        for vp_stage in range(parallel.vp_size):
            try:
                chunk = self.core_config.provide(
                    pre_process=parallel.is_first_stage and vp_stage == 0,
                    post_process=parallel.is_last_stage and vp_stage == parallel.vp_size - 1,
                    vp_stage=vp_stage if parallel.vp_size > 1 else None,
                )
            except ImportError as error:
                raise ModelError(
                    f"model.provider = bridge: the layers of {self.spec.architecture} need another"
                    f" package: {first_line(error)}; install it"
                ) from error
            self._check(chunk)
            # core's gradient norm reads these attributes of every parameter
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            chunks.append(chunk.to(parallel.device))
        return chunks

    def load(self, chunks: list[GPTModel]) -> None:
        """Fill every parameter; raise CheckpointError where Bridge cannot."""
        # Bridge reports neither a parameter without a mapping nor damaged files: fill all with NaN,
        # and look for what stayed NaN
        with torch.no_grad():
            for _, tensor in tensors_of(chunks):
                tensor.fill_(math.nan)
        try:
            self.bridge.load_hf_weights(chunks)
        except (
            AttributeError,
            KeyError,
            ValueError,
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:
            if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
                raise  # a signal, out of memory or a lost rank: the files are not the cause
            raise CheckpointError(
                f"{self.model.path}: Megatron-Bridge cannot load it: {first_line(error)}"
            ) from error
        unfilled = [
            name for name, tensor in tensors_of(chunks) if not bool(tensor.isfinite().all())
        ]
        if unfilled:
            problem = listed("were not filled with finite values by Megatron-Bridge", unfilled)
            raise CheckpointError(
                f"{self.model.path}: {problem}; the file is damaged, or Bridge has no mapping for"
                " them"
            )

    def export(self, chunks: list[GPTModel], max_sources: int) -> HFStream:
        """Yield every HF tensor on rank 0, whatever `max_sources` is.

        Bridge gathers every tensor on every rank, in its own order.
        """
        stream = self._export(chunks)
        return with_pairs_together(stream) if self.spec.q_lora_rank else stream

    def _export(self, chunks: list[GPTModel]) -> HFStream:
        padded = padded_vocab_size(self.spec, self.parallel.tp_size)
        in_checkpoint = outline(self.model.path)
        for name, tensor in self.bridge.export_hf_weights(chunks, cpu=False, show_progress=False):
            if is_left_out(name, in_checkpoint):
                continue  # Bridge exports a tied head where the checkpoint has a copy of it
            if tensor.shape[0] == padded and name in self._vocabulary:
                # Bridge does not remove its padding rows
                tensor = tensor[: self.spec.vocab_size]
            content = None if self.parallel.rank else tensor.contiguous()
            yield HFTensor(name, tuple(tensor.shape), tensor.dtype, 0, content)

    def _check(self, chunk: torch.nn.Module) -> None:
        """Raise ModelError for a model that the engine would compute wrongly; set the epsilon of
        the norms of latents.
        """
        kind, heads = self.spec.architecture, self.spec.head_dim
        if not isinstance(chunk, GPTModel):
            raise ModelError(
                f"model.provider = bridge: Megatron-Bridge builds {kind} as {type(chunk).__name__},"
                " the engine trains GPTModel only; use a text model with attention in every layer"
            )
        for name, module in chunk.named_modules():
            if (
                self.parallel.tp_size > 1
                and name.endswith(".q_layernorm")
                and any(weight.numel() > heads for weight in module.parameters())
                and not self.spec.is_mla
            ):
                raise ModelError(
                    f"parallel.tp = {self.parallel.tp_size}: {kind} normalises queries over all"
                    " heads, but a tensor rank has only some, and the gradient would lack the"
                    " others'; set it to 1 (and use ep)"
                )
            if name.endswith(("linear_q_up_proj", "linear_kv_up_proj")) and hasattr(
                module, "layer_norm_weight"
            ):
                # transformers' and SGLang's norms of latents do not use rms_norm_eps
                module.eps = LATENT_EPS


OVERRIDES: dict[str, object] = {
    # TransformerEngine's layer specs, with its layers or those of te_layers.py
    "transformer_impl": "transformer_engine",
    # Bridge knows experts by the parameter names of grouped layers
    "moe_grouped_gemm": True,
    "moe_shared_expert_overlap": False,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,  # layers for multi-token prediction are neither trained nor exported
    "cross_entropy_loss_fusion": False,  # log-probs are computed from the logits here
    "deallocate_pipeline_outputs": False,
    "fp16": False,
    "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1,  # times tp, as in models.spec.padded_vocab_size
}
"""Fields that some of Bridge's providers set to other values."""


WRONG = {
    "Ernie4_5_MoeForCausalLM": (
        "it routes by sigmoid scores, transformers and the servers by softmax: other experts, other"
        " gates"
    ),
}
"""Architectures that Megatron-Bridge 0.6.2 builds as another model, by a comparison of logits."""


FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")
"""Fusions of which Bridge knows whether a model can have them."""


def read_spec(model: ModelConfig, device: torch.device | None) -> ModelSpec:
    """Return the sizes of the model.

    device: the device on which this process builds it afterwards; None: it builds none.
    """
    te = device is not None and uses_transformer_engine(model, device)
    bridge = open_bridge(model.path, te=te)
    return spec_of(make_provider_of(bridge, model.path), bridge)


def make_provider_of(bridge: AutoBridge, path: Path) -> GPTModelProvider:
    """Return Bridge's configuration of the model.

    Raises ModelError for a config.json without the keys that Bridge reads.
    """
    try:
        return bridge.to_megatron_provider(load_weights=False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.provider = bridge: Megatron-Bridge {VERSION} cannot read {path}/config.json:"
            f" {type(error).__name__}: {first_line(error)}; take the published config.json"
        ) from error


def open_bridge(path: Path, *, te: bool) -> AutoBridge:
    """Return Megatron-Bridge's bridge of this checkpoint.

    te: its layers are TransformerEngine's, on a GPU; else those of te_layers.py.
    Raises ModelError where Bridge does not know the model, and where open_package does.
    """
    architecture = str((load_hf_config(path).get("architectures") or ["(none)"])[0])
    if architecture in WRONG:
        raise ModelError(
            f"model.provider = bridge: Megatron-Bridge {VERSION} does not compute {architecture} as"
            f" published: {WRONG[architecture]}; not supported"
        )
    AutoBridge = open_package(te=te)
    try:
        return AutoBridge.from_hf_pretrained(str(path))
    except ValueError as error:
        raise ModelError(f"model.provider = bridge: {path}: {first_line(error)}") from error


def spec_of(provider: GPTModelProvider, bridge: AutoBridge) -> ModelSpec:
    """Return the sizes of the model, from Bridge's provider before it is finalized."""
    core: Any = provider
    heads, experts = core.num_attention_heads, core.num_moe_experts or 0
    latent: dict[str, Any] = {}
    if core.multi_latent_attention:
        latent = dict(
            q_lora_rank=core.q_lora_rank or 0,
            kv_lora_rank=core.kv_lora_rank,
            qk_nope_dim=core.qk_head_dim,
            qk_rope_dim=core.qk_pos_emb_head_dim,
            v_head_dim=core.v_head_dim,
        )
    # the first one is that by which Bridge chose its class
    architectures = bridge.hf_pretrained.config.architectures or ["(none)"]
    return ModelSpec(
        architecture=architectures[0],
        num_layers=core.num_layers,
        moe_layers=moe_layers(core.moe_layer_freq, core.num_layers) if experts else (),
        top_k=core.moe_router_topk if experts else 0,
        num_experts=experts,
        vocab_size=core.vocab_size,
        router=RouterKind(
            score_function=core.moe_router_score_function,
            pre_softmax=core.moe_router_pre_softmax and core.moe_router_score_function == "softmax",
            expert_bias=core.moe_router_enable_expert_bias,
            num_groups=core.moe_router_num_groups,
            group_topk=core.moe_router_group_topk,
            scaling_factor=core.moe_router_topk_scaling_factor,
        ),
        hidden_size=core.hidden_size,
        num_heads=heads,
        num_kv_heads=core.num_query_groups or heads,
        head_dim=core.kv_channels or core.hidden_size // heads,
        ffn_size=core.ffn_hidden_size,
        expert_ffn_size=(core.moe_ffn_hidden_size or core.ffn_hidden_size) if experts else 0,
        rms_eps=core.layernorm_epsilon,
        rope_theta=core.rotary_base,
        max_positions=core.seq_length,
        tie_embeddings=core.share_embeddings_and_output_weights,
        qk_norm="head" if core.qk_layernorm and not core.multi_latent_attention else "none",
        qkv_bias=core.add_qkv_bias or core.add_bias_linear,
        rotary_fraction=core.rotary_percent,
        shared_ffn_size=core.moe_shared_expert_intermediate_size or 0,
        shared_gate=core.moe_shared_expert_gate,
        mtp_layers=core.mtp_num_layers or 0,
        **latent,
    )


def moe_layers(frequency: int | list[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers with experts by core's moe_layer_freq: every n-th from the first layer on,
    or a list with a 1 for every such layer.
    """
    if isinstance(frequency, int):
        return tuple(range(0, num_layers, frequency))
    return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)


def tensors_of(chunks: list[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers of a checkpoint (biases that select experts)."""
    for chunk in chunks:
        yield from chunk.named_parameters()
        yield from (
            (name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")
        )
