"""The section of sampling and of the SGLang servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.config.base import AboveZero, Count, NotNegative, Positive, Section, Share
from megatron_rl.config.parity_limits import check_parity_keys
from megatron_rl.config.server_rules import check_servers

FULL_VOCABULARY = (
    "the trainer's log-probs are of softmax(logits / rollout.temperature) over the whole vocabulary, and pi/mu needs those "
    "of the distribution that was sampled; remove the key, rollout.temperature is what can be changed"
)
NOT_SAMPLED_WITH = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


class RolloutConfig(Section):
    """Sampling and the SGLang servers; without `urls` the run starts its own."""

    max_response_tokens: Positive = 1024
    """A response that reaches it is cut off, and counted as truncated."""
    temperature: AboveZero = 1.0
    """Of sampling in training; the trainer's log-probs are divided by it, too."""
    top_p: Literal[1.0] = 1.0  # type: ignore[valid-type]  # PEP 586 has no float literals, pydantic has
    """Only 1.0, and no top-k, min-p or penalty: log pi and log mu are of softmax(logits / temperature) over all tokens."""
    urls: tuple[str, ...] = ()
    """SGLang servers that are already running, e.g. http://10.0.0.2:30000: the servers themselves, no router."""
    num_servers: Positive = 1
    """Servers this run starts, all alike."""
    max_server_restarts: Count = 3
    """How many dead servers this run replaces, in all, before it stops; 0 = the first death stops it.  Not for `urls`."""
    gpus: tuple[int, ...] = ()
    """GPUs of the servers this run starts, dealt out evenly in this order (CUDA_VISIBLE_DEVICES); default: all this run sees."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Of the servers' weights; auto: the checkpoint's own."""
    host: str = "127.0.0.1"
    """Where servers that this run starts listen; one that other machines can reach needs api_key_env."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the first server this run starts, the next one's is one higher; 0 picks free ones."""
    server_args: tuple[str, ...] = ()
    """Extra SGLang options, as on its command line."""
    max_total_tokens: Positive = 16384
    """Tokens of the KV cache of one server; a prompt with its response must fit."""
    max_running_requests: Positive = 64
    """Requests that one server decodes at the same time."""
    start_timeout_seconds: AboveZero = 300.0
    """Until a server that this run starts answers."""
    request_timeout_seconds: AboveZero = 600.0
    """Total time of one request, sampling included."""
    weight_sync_timeout_seconds: AboveZero = 600.0
    """One call of a weight sync (a bucket, a flush, a checkpoint that is read); a server that takes longer is named."""
    connect_timeout_seconds: AboveZero = 10.0
    """Of a connection to a server."""
    idle_timeout_seconds: AboveZero = 60.0
    """Longest pause inside an answer that has begun (before that only the total counts: SGLang answers when it is done)."""
    max_retries: Count = 3
    """Further attempts of a request that failed for a reason that may pass."""
    max_concurrency: Positive = 64
    """Prompts in flight per data-parallel replica."""
    over_sample: NotNegative = 0.0
    """Share of additional groups a step samples; when enough are complete the slowest are aborted.  Dropped, that favours short
    responses (docs/design/server_faults.md): 0 = off."""
    partial: Literal["drop", "resume"] = "drop"
    """Groups that over_sample aborts are dropped, or resumed in the next step, where every token keeps
    the log-prob, experts and weight version it was sampled with.  resume takes one of max_staleness."""
    max_staleness: Count = 0
    """Weight syncs that may lie between sampling a token and training on it.  0: steps are synchronous.  What `partial`
    leaves of it lets a step be sampled while the one before trains (docs/guides/servers.md)."""
    save_tensors: bool = False
    """Also record tokens, log-probs and expert ids of every rollout, in side files of rollouts.jsonl."""
    weight_sync: Literal["distributed", "disk", "colocated"] = "distributed"
    """How new weights reach the servers: one collective broadcast per bucket, a checkpoint on a shared disk, or memory of this
    machine that both sides map (only servers this run starts)."""
    weight_sync_bucket_mb: Positive = 512
    """MiB of weights that are sent at a time."""
    release_memory: bool = False
    """Let the servers give weights and KV cache back while the run trains (GPU only, weight_sync = colocated; not run yet)."""
    quantize: Literal["none", "fp8"] = "none"
    """fp8: every weight sync rounds matrices to block-scaled e4m3 (128 x 128) and back: rollouts of FP8 weights, in `dtype`."""
    quantize_keep: tuple[str, ...] = ("*embed_tokens*", "*lm_head*", "*gate.weight", "*norm*")
    """HF names (shell patterns) that quantize leaves alone; default: embedding, output head, router, norms."""
    parity_warn_logprob_diff: AboveZero | Literal["auto"] = "auto"
    """Start-up comparison of trainer and server: warn above this mean of |log mu - log pi|, in nats per token; auto: as
    config/parity_limits.py has it for the two precisions (docs/guides/servers.md)."""
    parity_max_logprob_diff: AboveZero | Literal["auto"] = "auto"
    """The same: stop above this."""
    parity_warn_expert_overlap: Share | Literal["auto"] = "auto"
    """The same: warn below this mean share of a token's experts in a layer that both sides choose."""
    parity_min_expert_overlap: Share | Literal["auto"] = "auto"
    """The same: stop below this."""

    @property
    def samples_ahead(self) -> bool:
        """Whether a step is sampled while the one before is trained on."""
        return self.max_staleness > int(self.partial == "resume")

    @field_validator("top_p", mode="before")
    @classmethod
    def check_top_p(cls, value: object) -> float:
        if value not in (1.0, "1.0", "1"):
            raise ValueError(f"must be 1.0: {FULL_VOCABULARY}")
        return 1.0

    @model_validator(mode="after")
    def check_server_settings(self) -> RolloutConfig:
        check_servers(self)
        check_parity_keys(self)
        return self

    @model_validator(mode="after")
    def check_staleness(self) -> RolloutConfig:
        if self.partial == "resume" and not (self.over_sample > 0 and self.max_staleness > 0):
            raise ValueError(
                f"partial = resume needs over_sample > 0, got {self.over_sample:g}, which cuts responses short, and "
                f"max_staleness >= 1, got {self.max_staleness}: what a later step goes on with is older than that step's weights"
            )
        if self.partial == "drop" and self.max_staleness > 1:
            raise ValueError(
                f"max_staleness = {self.max_staleness} has no effect with partial = drop: sampling one step ahead makes tokens "
                "one push old; set max_staleness = 1, or partial = resume"
            )
        if self.samples_ahead and self.release_memory:
            raise ValueError(
                f"max_staleness = {self.max_staleness} with partial = {self.partial} samples while the model trains, for which "
                "release_memory = true takes the servers' memory; set max_staleness lower, or release_memory = false"
            )
        return self
