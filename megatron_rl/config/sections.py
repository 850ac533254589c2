"""Every setting, with its default, its rule and what it does."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_rl import presets
from megatron_rl.config.servers import check_own_servers, check_server_args
from megatron_rl.presets import PRESETS, AdvantageKind, Switches

Positive = Annotated[int, Field(gt=0)]
Bound = Annotated[float, Field(ge=0)]

WHOLE_VOCABULARY = (
    "the trainer's log-probs are of softmax(logits / rollout.temperature) over the whole vocabulary, and pi/mu needs those "
    "of the distribution that was sampled; remove the key, rollout.temperature is what can be changed"
)
NOT_SAMPLED_WITH = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")


class RunConfig(Section):
    """Geometry of a step and where results go."""

    name: str = "run"
    dir: Path = Path("runs")
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_steps: Positive = 60
    prompts_per_step: Positive = 16
    """P: prompts sampled per step, over all data-parallel replicas."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """G: responses per prompt."""
    num_mini_batches: Positive = 1
    """N: optimizer updates per step."""
    max_tokens_per_micro_batch: Positive = 4096
    """Rows per micro-batch and replica (a context-parallel rank holds 1/cp of them), a padded sequence's pads included; one
    longer sequence still gets a micro-batch of its own."""
    collective_timeout_minutes: Annotated[float, Field(gt=0)] = 30.0


class ModelConfig(Section):
    path: Path
    """HF checkpoint directory (config.json, tokenizer, safetensors)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    batch_format: Literal["thd", "bshd"] = "thd"
    """thd: a micro-batch's sequences are packed end to end; bshd: padded to its longest, one row of a batch each."""
    recompute: Literal["none", "full", "block", "selective"] = "none"
    """Activation recompute: full = every layer; block = the first recompute_layers of each chunk; selective = MoE layers."""
    recompute_layers: Positive = 1
    """full: layers that share one checkpoint; block: layers of each pipeline chunk that are recomputed."""
    fused_lm_head: bool = False
    """Log-probs straight from hidden states: the LM head is applied to a chunk of rows at a time, logits never exist whole.

    One more matrix product with the head in an update, for memory that does not grow with the micro-batch."""
    router_dtype: Literal["fp32", "fp64", "model"] = "fp32"
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"


class DataConfig(Section):
    train: Path
    """jsonl or parquet with one prompt per row."""
    prompt_key: str = "prompt"
    label_key: str = "label"
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; False feeds the text as it is."""
    max_prompt_tokens: Positive = 2048
    shuffle: bool = True


class RolloutConfig(Section):
    """Sampling and the SGLang servers.  With no `urls` the run starts its own servers."""

    max_response_tokens: Positive = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Literal[1.0] = 1.0
    """Only 1.0, and no top-k, min-p or penalty: log pi and log mu are of softmax(logits / temperature) over all tokens."""
    urls: tuple[str, ...] = ()
    """SGLang servers that are already running, e.g. http://10.0.0.2:30000: the servers themselves, no router."""
    num_servers: Positive = 1
    """Servers this run starts, all alike."""
    max_server_restarts: Annotated[int, Field(ge=0)] = 3
    """How many dead servers this run replaces, in all, before it stops; 0 = the first death stops it.  Not for `urls`."""
    gpus: tuple[int, ...] = ()
    """GPUs of the servers this run starts, dealt out evenly in this order (CUDA_VISIBLE_DEVICES); default: all this run sees."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first server this run starts, the next one's is one higher; 0 picks free ones."""
    server_args: tuple[str, ...] = ()
    """Extra SGLang options, as on its command line."""
    max_total_tokens: Positive = 16384
    max_running_requests: Positive = 64
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 300.0
    request_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Total time of one request, sampling included."""
    connect_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    idle_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest pause inside an answer that has begun (before that only the total counts: SGLang answers when it is done)."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    max_concurrency: Positive = 64
    """Prompts in flight per data-parallel replica."""
    over_sample: Annotated[float, Field(ge=0)] = 0.0
    """Share of additional groups a step samples; when enough are complete the slowest are aborted and dropped.  Favours short
    responses (docs/reliability.md): 0 = off."""
    save_tensors: bool = False
    """Also record tokens, log-probs and expert ids of every rollout, in side files of rollouts.jsonl."""
    push: Literal["distributed", "disk"] = "distributed"
    """How new weights reach the servers: one collective broadcast per bucket, or a checkpoint on a shared disk."""
    push_bucket_mb: Positive = 512
    quantize: Literal["none", "fp8"] = "none"
    """fp8: every push rounds matrices to block-scaled e4m3 (128 x 128) and back: rollouts come from FP8 weights, in `dtype`."""
    quantize_keep: tuple[str, ...] = ("*embed_tokens*", "*lm_head*", "*mlp.gate.*", "*norm*")
    """HF names (shell patterns) that quantize leaves alone; default: embedding, output head, router, norms."""

    @field_validator("top_p", mode="before")
    @classmethod
    def check_top_p(cls, value: Any) -> Any:
        if value != 1.0:
            raise ValueError(f"{value!r} must be 1.0: {WHOLE_VOCABULARY}")
        return value

    @model_validator(mode="after")
    def check_servers(self) -> RolloutConfig:
        check_server_args(self.server_args, has_key=self.api_key_env is not None)
        check_own_servers(self.urls, self.num_servers, self.gpus)
        return self


class RewardConfig(Section):
    function: str = "math"
    """`math` (math-verify) or `package.module:function` with signature (prompt, response, label) -> float."""
    num_workers: Positive = 1
    timeout_seconds: Annotated[float, Field(gt=0)] = 5.0


class BatchConfig(Section):
    """Which responses a step learns from (DAPO, arXiv 2503.14476); all off by default."""

    dynamic_sampling: bool = False
    """Replace groups whose responses all score alike by newly sampled ones: they have no advantage and teach nothing."""
    max_sampling_rounds: Positive = 4
    """dynamic_sampling: draws after the first; what is missing then is filled with groups of equal rewards."""
    overlong_cache: Annotated[int, Field(ge=0)] = 0
    """Overlong shaping: within this many tokens of rollout.max_response_tokens the reward falls, by up to 1; 0 = off."""
    filter_truncated: bool = False
    """Overlong filtering: responses that reached the length limit leave the loss and its denominators."""


class AdvantageConfig(Section):
    kind: Literal["auto"] | AdvantageKind = "auto"
    """auto: as the loss preset has it (minirl: mean).  Formulas: batch/advantage.py."""


class ReplayConfig(Section):
    mode: Literal["none", "R2", "R3"] = "R3"
    measure: bool = True
    """Compare the live top-k with the rollout's experts in the old-logprob pass (needs routes from the server)."""
    on_gap: Literal["error", "live", "mask_token", "drop_sample"] = "error"
    """What to do with a token for which the server sent no route: error = stop the run; live = the router chooses; mask_token =
    live, and the token it predicts leaves the loss; drop_sample = sample the response anew."""
    gap_budget: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of a step's response tokens (and, apart, of its prompt tokens) without a route, above which the run stops;
    drop_sample: of its samples dropped for that.  Under batch.dynamic_sampling every draw is judged.  error does not use it."""


class LossConfig(Section):
    """A preset and, where set, other positions of its switches.  Meaning: megatron_rl/presets.py, docs/algorithm.md."""

    name: str = "minirl"
    """A preset, or `package.module:function` (docs/algorithm.md, Your own loss)."""
    weight: presets.Ratio | None = None
    weight_level: presets.Level | None = None
    weight_mode: presets.WeightMode | None = None
    weight_low: Bound | None = None
    weight_high: Annotated[float, Field(gt=0)] | None = None
    """minirl: 5, the upper truncation of the importance weight pi/mu; inf = no truncation."""
    clip: presets.ClipKind | None = None
    clip_anchor: presets.ClipAnchor | None = None
    clip_level: presets.Level | None = None
    clip_low: Bound | None = None
    clip_high: Bound | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reject: presets.Ratio | None = None
    reject_level: presets.SequenceLevel | None = None
    reject_low: Bound | None = None
    reject_high: Bound | None = None
    reject_negative_only: bool | None = None
    form: presets.Form | None = None
    aggregation: presets.Aggregation | None = None
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Constant factor on the loss, e.g. 1 / max_response_tokens; never data-dependent."""
    entropy_coef: float = 0.0
    """Bonus on the full-vocabulary entropy, per token; 0 = off."""
    kl_coef: Bound = 0.0
    """Penalty on the KL to the model as it was loaded, per token; 0 = off.  On: one more forward pass per mini-batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"

    @property
    def switches(self) -> Switches:
        """The preset's switches, with those set here."""
        given = {field.name: getattr(self, field.name, None) for field in fields(Switches)}
        return replace(PRESETS.get(self.name, Switches()), **{k: v for k, v in given.items() if v is not None})

    @model_validator(mode="after")
    def check_switches(self) -> LossConfig:
        if ":" in self.name:  # a user's function may read any switch
            return self
        if self.name not in PRESETS:
            raise ValueError(
                f"name = {self.name!r} is no loss{nearest(self.name, list(PRESETS))}; or package.module:function"
            )
        presets.check(self.name, self.switches, given={key for key, value in self if value is not None})
        return self


class OptimConfig(Section):
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate; 0 is allowed and trains nothing (measurement runs)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    distributed: bool = True
    """megatron-core's distributed optimizer (state sharded over data-parallel ranks)."""
    max_skipped_updates: Positive = 3
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""


class ParallelConfig(Section):
    tp: Positive = 1
    pp: Positive = 1
    vp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    layers_per_stage: tuple[Positive, ...] = ()
    """Decoder layers of each of the pp x vp stages, in the order a token meets them; stage i lies on pipeline rank i % pp.

    Default: equal shares.
    """
    etp: Positive | None = None
    """Expert tensor parallel size; default tp, as megatron-core does."""
    sequence_parallel: bool | None = None
    """Default: on when tp > 1."""

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel


class EvalConfig(Section):
    sets: dict[str, Path] = {}
    """Name -> prompt file; metrics appear as eval/NAME/avg@k."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    samples: Positive = 4
    """k of avg@k and pass@k."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_prompts: Positive | None = None


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 = only after the last step."""
    resume: bool = True
    """Continue from the newest checkpoint in the run directory, if there is one."""
    export_hf: bool = True
    """Write the trained model as an HF checkpoint at the end."""


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    replay: ReplayConfig = ReplayConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def advantage_kind(self) -> AdvantageKind:
        """The kind of advantage, with "auto" resolved."""
        return self.loss.switches.advantage if self.advantage.kind == "auto" else self.advantage.kind

    @property
    def needs_routes(self) -> bool:
        """Whether rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @model_validator(mode="after")
    def check_combinations(self) -> Config:
        run, parallel = self.run, self.parallel
        if run.prompts_per_step % run.num_mini_batches:
            raise ValueError(
                f"run.prompts_per_step = {run.prompts_per_step} must be a multiple of run.num_mini_batches = "
                f"{run.num_mini_batches}: mini-batches hold whole prompt groups"
            )
        if self.advantage_kind != "batch_whitened" and run.group_size < 2:
            raise ValueError(
                f"advantage.kind = {self.advantage_kind} needs run.group_size >= 2, got {run.group_size}: a response alone in "
                "its group has no other to be compared with, and its advantage would be 0; or set advantage.kind = batch_whitened"
            )
        if self.batch.dynamic_sampling and run.group_size < 2:
            raise ValueError(
                f"batch.dynamic_sampling needs run.group_size >= 2, got {run.group_size}: rewards of one response never differ"
            )
        if self.batch.overlong_cache > self.rollout.max_response_tokens:
            raise ValueError(
                f"batch.overlong_cache = {self.batch.overlong_cache} exceeds rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}: it is the last part of a response; lower it"
            )
        if parallel.vp > 1 and parallel.pp == 1:
            raise ValueError(f"parallel.vp = {parallel.vp} needs parallel.pp > 1: it interleaves pipeline stages")
        stages = parallel.pp * parallel.vp
        if parallel.layers_per_stage and len(parallel.layers_per_stage) != stages:
            raise ValueError(
                f"parallel.layers_per_stage = {list(parallel.layers_per_stage)} must name {stages} stages = parallel.pp x vp"
            )
        if parallel.sequence_parallel is False and parallel.tp > 1 and (parallel.ep > 1 or parallel.expert_tp > 1):
            raise ValueError(
                "parallel.sequence_parallel = false with tp > 1: megatron-core's MoE needs it; remove the key"
            )
        if self.model.recompute_layers > 1 and self.model.recompute in ("none", "selective"):
            raise ValueError(
                f"model.recompute_layers = {self.model.recompute_layers} has no effect with model.recompute = "
                f"{self.model.recompute}; remove it, or set recompute = full or block"
            )
        if self.replay.on_gap != "error" and not self.needs_routes:
            raise ValueError(
                f"replay.on_gap = {self.replay.on_gap} has no effect: replay.mode = {self.replay.mode} without replay.measure "
                "asks for no routes; remove it"
            )
        if self.replay.on_gap == "mask_token" and self.replay.mode != "R3":
            raise ValueError(
                f"replay.on_gap = mask_token needs replay.mode = R3, got {self.replay.mode}: otherwise no token trains on the "
                "rollout's routes; use live, or drop_sample"
            )
        if run.device == "cpu" and self.model.layer_spec == "transformer_engine":
            raise ValueError(
                "model.layer_spec = transformer_engine needs a GPU; use auto or local with run.device = cpu"
            )
        return self


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
