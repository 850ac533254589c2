"""The verdict on every setting of an SGLang server that touches expert ids, log-probs or weights.  Data; no logic.

Names and values as /server_info of SGLang 0.5.21 and 0.5.23 spells them; an option of the command line is the name with
dashes.  A setting that is not here touches none of the three beyond rounding, which the parity check measures
(tests/unit/config/settings_without_effect.txt has all of them).  docs/guides/servers.md lists the
names by verdict, and a test compares both.

proven: shown by transformers on real servers, on the CPU.  refused: known to be wrong.  unproven: neither;
rollout.allow_unproven names what the user accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proven", "refused", "unproven"]
Touches = Literal["routes", "log-probs", "weights"]


@dataclass(frozen=True)
class Setting:
    """usual: the values without a verdict, as nothing depends on them; `verdict` is that on every other value.

    touches: what the setting may make wrong; one that touches routes alone is checked where the run needs routes.
    because: for "proven", the test that shows it.  aliases: further spellings of its option on the command line.
    """

    name: str
    usual: tuple[object, ...]
    verdict: Verdict
    touches: tuple[Touches, ...]
    because: str
    aliases: tuple[str, ...] = ()
    unproven_values: tuple[object, ...] = ()
    unproven_because: str = ""
    """Of a proven setting: values that are unproven, and why."""

    @property
    def options(self) -> tuple[str, ...]:
        return ("--" + self.name.replace("_", "-"), *self.aliases)


ROUTES: tuple[Touches, ...] = ("routes",)
LOGPROBS: tuple[Touches, ...] = ("log-probs",)
WEIGHTS: tuple[Touches, ...] = ("weights",)
SAMPLES: tuple[Touches, ...] = ("routes", "log-probs")
ALL: tuple[Touches, ...] = ("routes", "log-probs", "weights")

MOVED = "keys and values come from a place that holds no expert ids: the ids returned are those of other tokens"
CROWDED = "test_every_row_of_a_crowded_server_is_the_models"
NOT_ALL_LAYERS = "expert ids of all layers are never gathered: those of other stages are zeros (source)"
RECOMPUTED = "a part of the prefix is computed again; not run"
OTHER_RANKS = "expert ids are gathered from several ranks (source); needs GPUs, not run"
FUSED_STEPS = "one kernel for a whole step, which may write no expert ids; needs a GPU, not run"
OTHER_MODEL = "the server then computes another model than config.json, which the trainer reads"
QUANTISED = "a weight sync sends unquantised tensors, and the server may keep what it quantised before"

SETTINGS: tuple[Setting, ...] = (
    # the prefix cache
    Setting("enable_hierarchical_cache", (False,), "refused", ROUTES, f"{MOVED} (sglang#26975)"),
    Setting("hicache_storage_backend", (None,), "refused", ROUTES, f"{MOVED} (sglang#26975)"),
    Setting("enable_lmcache", (False,), "refused", ROUTES, MOVED),
    Setting("enable_flexkv", (False,), "refused", ROUTES, MOVED),
    Setting("enable_unified_cache_external_linker", (False,), "refused", ROUTES, MOVED),
    Setting("disaggregation_mode", ("null", None), "refused", ROUTES, "the server that decodes has no expert ids of the prompt"),
    Setting("disable_radix_cache", (False,), "proven", SAMPLES, CROWDED),
    Setting("page_size", (1, None), "unproven", SAMPLES, "a crowded CPU server with pages of 16 ended (0.5.21)"),
    Setting("radix_cache_backend", (None,), "unproven", SAMPLES, "another prefix cache than SGLang's own"),
    Setting("enable_session_radix_cache", (False,), "unproven", SAMPLES, "sessions keep prefixes over requests; not run"),
    Setting("enable_hisparse", (False,), "unproven", SAMPLES, "keys and values move between memories; not run"),
    Setting("prefill_only_disable_kv_cache", (False,), "unproven", SAMPLES, "expert ids are stored by place in the cache"),
    Setting("enable_page_major_kv_layout", (False,), "unproven", SAMPLES, "another layout of the cache; not run"),
    Setting("enable_kv_cache_sharding", (False,), "unproven", SAMPLES, "another layout of the cache; not run"),
    Setting("enable_unified_memory", (False,), "unproven", SAMPLES, "another layout of the cache; not run"),
    Setting("enable_encoder_swa_bounded_replay", (False,), "unproven", SAMPLES, RECOMPUTED),
    Setting("enable_decoder_swa_bounded_replay", (False, None), "unproven", SAMPLES, RECOMPUTED),
    Setting("enable_linear_replayssm", (False,), "unproven", SAMPLES, RECOMPUTED),
    # how requests are batched
    Setting(
        "chunked_prefill_size", (None,), "proven", SAMPLES, CROWDED, unproven_values=(-1,),
        unproven_because="without chunks the buffer of expert ids is sized for decoding alone (source); not run",
    ),
    Setting("enable_mixed_chunk", (False,), "proven", SAMPLES, CROWDED),
    Setting("disable_overlap_schedule", (False,), "proven", SAMPLES, CROWDED),
    Setting("num_continuous_decode_steps", (1,), "proven", SAMPLES, CROWDED),
    Setting("retraction_policy", ("length",), "unproven", SAMPLES, "retracts other requests; only length was run"),
    Setting("enable_dynamic_chunking", (False,), "unproven", SAMPLES, "made for pipeline stages; not run"),
    Setting("enable_two_batch_overlap", (False,), "unproven", SAMPLES, "half batches share a buffer of ids; not run"),
    Setting("enable_single_batch_overlap", (False,), "unproven", SAMPLES, "needs GPUs, not run"),
    Setting("enable_pdmux", (False,), "unproven", SAMPLES, "prefill and decode at the same time; needs GPUs, not run"),
    Setting("allow_auto_truncate", (False,), "refused", SAMPLES, "prompts that are too long are cut without an error"),
    # ranks
    Setting("tp_size", (1,), "proven", SAMPLES, CROWDED, ("--tensor-parallel-size", "--tp")),
    Setting("pp_size", (1,), "refused", ROUTES, NOT_ALL_LAYERS, ("--pipeline-parallel-size", "--pp")),
    Setting("dp_size", (1,), "unproven", ALL, OTHER_RANKS, ("--data-parallel-size", "--dp")),
    Setting("enable_dp_attention", (False,), "unproven", SAMPLES, OTHER_RANKS),
    Setting("attn_dp_size", (1,), "unproven", SAMPLES, OTHER_RANKS, ("--attention-data-parallel-size",)),
    Setting("ep_size", (1,), "unproven", ALL, OTHER_RANKS, ("--expert-parallel-size", "--ep")),
    Setting("moe_a2a_backend", ("none", None), "unproven", ROUTES, OTHER_RANKS),
    Setting("moe_dp_size", (1,), "unproven", SAMPLES, OTHER_RANKS, ("--moe-data-parallel-size",)),
    Setting("attn_cp_size", (1,), "unproven", SAMPLES, OTHER_RANKS, ("--attention-context-parallel-size",)),
    Setting("dcp_size", (1,), "unproven", SAMPLES, OTHER_RANKS, ("--decode-context-parallel-size",)),
    Setting("dwdp_size", (1,), "unproven", ALL, OTHER_RANKS),
    Setting("enable_prefill_cp", (False,), "unproven", SAMPLES, OTHER_RANKS),
    Setting("enable_cp_tp_group_sharing", (False,), "unproven", SAMPLES, OTHER_RANKS),
    Setting("enable_eplb", (False,), "unproven", ALL, "experts move and are copied; needs GPUs, not run"),
    Setting("ep_num_redundant_experts", (0,), "unproven", ALL, "experts are copied; needs GPUs, not run"),
    Setting("ep_dispatch_algorithm", (None,), "unproven", ALL, "chooses among copies of experts; needs GPUs, not run"),
    Setting("enable_waterfill", (False,), "unproven", ALL, "moves shared experts between ranks; needs GPUs, not run"),
    Setting("init_expert_location", ("trivial",), "unproven", ALL, "experts are in another order; needs GPUs, not run"),
    Setting("elastic_ep_backend", (None, "none"), "unproven", ALL, "experts move; needs GPUs, not run"),
    # how tokens are sampled
    Setting(
        "speculative_algorithm", (None,), "refused", SAMPLES,
        "drafts and MTP: the buffer of expert ids is not sized for verified tokens (its source says so), and a weight sync "
        "does not reach a draft model", ("--speculative-algo",),
    ),
    Setting("enable_watermark", (False,), "refused", LOGPROBS, "a key chooses tokens: they are not sampled from mu (source)"),
    Setting("dllm_algorithm", (None,), "refused", SAMPLES, "tokens are not sampled one after the other"),
    Setting("preferred_sampling_params", (None,), "refused", LOGPROBS, "changes the distribution that is sampled from"),
    Setting(
        "SGLANG_RETURN_ORIGINAL_LOGPROB", ("0",), "refused", LOGPROBS,
        "log-probs are of temperature 1, not of the sampled distribution",
    ),
    Setting("reasoning_parser", (None,), "proven", LOGPROBS, CROWDED),
    Setting("tool_call_parser", (None,), "proven", LOGPROBS, CROWDED),
    Setting("grammar_backend", (None, "xgrammar"), "proven", LOGPROBS, CROWDED),
    Setting("enable_strict_thinking", (False,), "unproven", LOGPROBS, "a grammar forbids tokens within the thinking part"),
    Setting("enable_deterministic_inference", (False,), "unproven", SAMPLES, "other kernels and sampler; needs a GPU, not run"),
    Setting("rl_on_policy_target", (None,), "unproven", SAMPLES, "other kernels; needs a GPU, not run"),
    Setting("enable_nvidia_megakernel", (False,), "unproven", SAMPLES, FUSED_STEPS),
    Setting("enable_amd_monokernel", (False,), "unproven", SAMPLES, FUSED_STEPS),
    Setting("forward_hooks", (None,), "unproven", SAMPLES, "code of yours within the forward pass"),
    # the model and its precision
    Setting("enable_return_routed_experts", (True,), "refused", ROUTES, "expert ids are left out without an error"),
    Setting("json_model_override_args", ("{}", None), "refused", ALL, OTHER_MODEL),
    Setting("model_impl", ("auto", "sglang"), "unproven", ALL, "another implementation of the model; not run"),
    Setting("quantization", (None,), "unproven", ALL, QUANTISED),
    Setting("quantize_and_serve", (False,), "unproven", ALL, QUANTISED),
    Setting("modelopt_quant", (None,), "unproven", ALL, QUANTISED),
    Setting("rl_quant_profile", (None,), "unproven", ALL, QUANTISED),
    Setting("kt_weight_path", (None,), "unproven", ALL, QUANTISED),
    Setting("kv_cache_dtype", ("auto",), "unproven", LOGPROBS, "rounded keys and values; not run"),
    Setting("enable_w4a4_mxfp4_megamoe", (False,), "unproven", ALL, QUANTISED),
    Setting("enable_megamoe_for_layernorm_sp", (False,), "unproven", ALL, QUANTISED),
    Setting("qsa_indexer_dtype", ("auto", "bfloat16"), "unproven", LOGPROBS, "rounded keys of the index; not run"),
    Setting("enable_int8_mamba_checkpoint", (False,), "unproven", LOGPROBS, "rounded states; not run"),
    Setting("enable_mamba_cache_stochastic_rounding", (False,), "unproven", LOGPROBS, "rounded states; not run"),
    Setting("enable_quant_communications", (False,), "unproven", LOGPROBS, "rounded sums over ranks; needs GPUs, not run"),
    Setting("enable_lora", (None, False), "unproven", ALL, "a weight sync does not reach adapters"),
    Setting("lora_paths", (None,), "unproven", ALL, "a weight sync does not reach adapters"),
    # where weights come from and stay
    Setting("load_format", ("auto", "safetensors", "pt"), "unproven", WEIGHTS, "what a sync does not replace may be wrong"),
    Setting("custom_weight_loader", ([], None), "unproven", WEIGHTS, "code of yours that loads weights"),
    Setting("weight_cache_mode", ("off",), "unproven", WEIGHTS, "weights are shared with other servers; not run"),
    Setting("cpu_offload_gb", (0,), "unproven", WEIGHTS, "a weight sync into offloaded tensors was not run"),
    Setting("offload_group_size", (-1,), "unproven", WEIGHTS, "a weight sync into offloaded tensors was not run"),
    Setting("enable_paged_experts", (False,), "unproven", WEIGHTS, "a weight sync into experts on the host was not run"),
    Setting("version", (), "unproven", ALL, "no test ran on this version of SGLang"),
)  # fmt: skip
