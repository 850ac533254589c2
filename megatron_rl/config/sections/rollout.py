"""[rollout]: sampling and the SGLang servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from megatron_rl.config.base import AboveZero, Count, NotNegative, Positive, Section, Share
from megatron_rl.config.device_limits import (
    PROBE_SECONDS,
    START_SECONDS,
    AutoSeconds,
    Device,
    seconds,
)

FULL_VOCABULARY = (
    "the trainer's log-probs are of softmax(logits / rollout.temperature) over the whole "
    "vocabulary, and pi/mu needs the sampled distribution; remove the key, and change "
    "rollout.temperature instead"
)
NOT_SAMPLED_WITH = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
MOST_KEPT = 65_535
"""The largest top_k: the size of a kept set is stored in 16 bits."""


class Truncation(NamedTuple):
    """The limits that make the set S_t of a sampled token, in SGLang's terms."""

    top_p: float
    top_k: int
    min_p: float


ALL_TOKENS = Truncation(1.0, -1, 0.0)


class RolloutConfig(Section):
    """Sampling and the SGLang servers; without `urls` the run starts its own."""

    # sampling
    max_response_tokens: Positive = 1024
    """A response that reaches this length is cut off, and counted as truncated."""
    temperature: AboveZero = 1.0
    """Sampling temperature in training; the trainer divides its logits by it, too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train on samples of the smallest set of tokens with this much probability
    (docs/guides/sampling.md).  Needs top_k."""
    top_k: Annotated[int, Field(ge=-1, le=MOST_KEPT)] = -1
    """Train on samples of the k most probable tokens; -1: all. top_p and min_p need a top_k of at
    most --sampling-mask-max-tokens (4096)."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Train on samples of the tokens with at least this share of the most probable token's
    probability.  Needs top_k."""
    # servers: running ones, or those that the run starts
    urls: tuple[str, ...] = ()
    """SGLang servers that are already running, e.g. http://10.0.0.2:30000; not a router in front of
    them."""
    num_servers: Positive = 1
    """Number of identical servers that this run starts."""
    max_server_restarts: Count = 3
    """Dead servers that this run replaces before it stops.  Not for `urls`."""
    gpus: tuple[Count, ...] = ()
    """GPUs of the servers this run starts, divided evenly (CUDA_VISIBLE_DEVICES).  Default: the
    first visible ones, which training ranks use, too: weight_sync = distributed refuses that."""
    python: Path | None = None
    """Python that starts the servers, with SGLang installed, e.g. /opt/sglang/bin/python; default:
    that of the run."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Precision of the servers' weights; auto: that of the checkpoint."""
    host: str = "127.0.0.1"
    """Address that servers of this run listen on; one that other machines can reach needs
    api_key_env."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the first server this run starts, then counting up; 0 picks free ones."""
    server_args: tuple[str, ...] = ()
    """Further options of SGLang's command line."""
    allow_unproven: tuple[str, ...] = ()
    """Settings of SGLang that no test has shown to keep expert ids, log-probs and weights right,
    and that you accept (docs/guides/servers.md)."""
    max_total_tokens: Positive = 16384
    """Tokens of the KV cache of one server; a prompt with its response must fit."""
    max_running_requests: Positive = 64
    """Requests that one server decodes at the same time."""
    # time limits and retries
    start_timeout_seconds: AutoSeconds = "auto"
    """Time until a server that this run starts must answer; auto: 900 on the CPU, 1200 on a GPU,
    at most 81 % of run.collective_timeout_minutes."""
    probe_timeout_seconds: AutoSeconds = "auto"
    """Time of each request that checks a server at start-up; auto: 60 on the CPU, 600 on a GPU."""
    request_timeout_seconds: AboveZero = 600.0
    """Total time of one request, sampling included, without pauses by weight_update = in_place."""
    weight_sync_timeout_seconds: AboveZero = 600.0
    """Time of one call of a weight sync (a bucket, a flush, loading a checkpoint), or of one for
    release_memory; a server that takes longer is named."""
    connect_timeout_seconds: AboveZero = 10.0
    """Time to connect to a server."""
    idle_timeout_seconds: AboveZero = 60.0
    """Longest pause within an HTTP response that has started."""
    max_retries: Count = 3
    """Further attempts of a request after a transient error."""
    # amount of sampling, and its lead over training
    max_concurrency: Positive = 64
    """Prompts in flight per data-parallel replica."""
    over_sample: NotNegative = 0.0
    """Fraction of additional groups that a step samples; when enough are complete the slowest are
    aborted.  Dropping those favours short responses (docs/design/architecture.md#faults)."""
    partial: Literal["drop", "resume"] = "drop"
    """Groups that over_sample aborts are dropped, or resumed in the next step, which uses one of
    the max_staleness weight syncs."""
    max_staleness: Count = 0
    """Weight syncs allowed between sampling a token and training on it. 0: steps are synchronous.
    While a step trains, the next max_staleness steps are sampled; with partial = resume one fewer
    (docs/design/architecture.md#scheduler)."""
    weight_update: Literal["drain", "abort", "in_place"] = "drain"
    """Treatment by a weight sync of responses that are sampled ahead. drain: it waits for the
    groups in progress; abort: they are cut short and continue from a prefill; in_place: servers
    keep them, and continue with the new weights (docs/guides/sampling.md)."""
    # recording
    save_tensors: bool | Annotated[float, Field(gt=0, le=1)] = False
    """Also record, token by token, what the servers returned and what the trainer knew
    (docs/reference/token_data.md).  A number: of this share of a step's groups, at least one;
    true: of all."""
    # weight sync
    weight_sync: Literal["distributed", "disk", "colocated", "adapter"] = "distributed"
    """Way of new weights to the servers: a broadcast per bucket, a checkpoint on a shared disk,
    shared memory of this machine (servers of the run), or with [lora] the adapters alone
    (docs/guides/lora.md#adapters-on-servers)."""
    weight_sync_bucket_mb: Positive = 512
    """MiB of weights per bucket of a weight sync."""
    weight_sync_sources: Positive = 1
    """weight_sync = distributed: largest number of training ranks that send weights.  Each one
    takes memory of every GPU of a server (docs/guides/servers.md#weight-sync)."""
    verify_push: Literal["version", "checksum"] = "checksum"
    """Proof of a weight sync. version: servers report the new version. checksum: after every
    n-th sync checksums of the tensors are compared, too
    (docs/guides/servers.md#verified-by-checksums)."""
    verify_push_every: Positive = 20
    """n of verify_push = checksum: the first weight sync of a run is verified, then every n-th."""
    # GPUs that servers and trainer share
    release_memory: bool = False
    """Servers and trainer use the same GPUs in turn (docs/guides/servers.md#layouts).  Not run so
    far."""
    # rounding of the weights
    quantize: Literal["none", "fp8"] = "none"
    """fp8: every weight sync rounds matrices to block-scaled e4m3 (128 x 128) and back."""
    quantize_keep: tuple[str, ...] = ("*embed_tokens*", "*lm_head*", "*gate.weight", "*norm*")
    """HF names (shell patterns) that quantize skips."""
    # parity check at start-up
    parity_warn_logprob_diff: AboveZero | Literal["auto"] = "auto"
    """Start-up comparison of trainer and server: warn above this mean of |log mu - log pi|, in
    nats per token (docs/guides/servers.md#trainer-against-server-limits)."""
    parity_max_logprob_diff: AboveZero | Literal["auto"] = "auto"
    """The same: stop above this."""
    parity_warn_expert_overlap: Share | Literal["auto"] = "auto"
    """The same: warn below this mean fraction of a token's experts in a layer that both sides
    choose."""
    parity_min_expert_overlap: Share | Literal["auto"] = "auto"
    """The same: stop below this."""

    @property
    def truncation(self) -> Truncation | None:
        """The limits of training samples; None if these come from the entire vocabulary."""
        limits = Truncation(self.top_p, self.top_k, self.min_p)
        return None if limits == ALL_TOKENS else limits

    @property
    def saved_share(self) -> float:
        """The share of a step's groups whose tensors are saved."""
        return float(self.save_tensors)

    @property
    def steps_ahead(self) -> int:
        """The number of steps that are sampled while the one before them trains."""
        return max(0, self.max_staleness - int(self.partial == "resume"))

    @property
    def trains_on_all(self) -> bool:
        """True if every group that is started is trained on: over_sample drops none."""
        return not self.over_sample or self.partial == "resume"

    def start_seconds(self, device: Device) -> float:
        return seconds(self.start_timeout_seconds, START_SECONDS, device)

    def probe_seconds(self, device: Device) -> float:
        return seconds(self.probe_timeout_seconds, PROBE_SECONDS, device)
