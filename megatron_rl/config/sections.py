"""All settings except [run] (run.py), [rollout] (rollout.py) and [agent] (agent.py): default, rule and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from megatron_rl.config import loss_presets as presets
from megatron_rl.config import loss_rules
from megatron_rl.config.base import AboveZero, Bound, Count, Finite, NotNegative, Positive, Section, Share, nearest
from megatron_rl.config.device_limits import AutoSeconds
from megatron_rl.config.loss_presets import PRESETS, AdvantageKind, LossSpec
from megatron_rl.config.renamed import new_metric

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The model that is trained, and how its layers are computed."""

    path: Path
    """HF checkpoint directory (config.json, tokenizer, safetensors)."""
    provider: Literal["native", "bridge", "auto"] = "native"
    """Who builds, loads and exports the model: native = this program's tables; bridge = Megatron-Bridge, for every architecture
    that it knows (Python 3.12); auto = native where its tables know the architecture, else bridge."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the trained weights; the optimizer keeps a float32 copy of bfloat16 ones."""
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the layers; auto: transformer_engine if it is installed, there is a GPU, and dtype is bfloat16."""
    batch_format: Literal["thd", "bshd"] = "thd"
    """thd: a micro-batch's sequences are packed end to end; bshd: padded to its longest, one row of a batch each."""
    recompute: Literal["none", "full", "block", "selective"] = "none"
    """Activation recompute: full = every layer; block = the first recompute_layers of each chunk; selective = MoE layers."""
    recompute_layers: Positive = 1
    """full: layers per activation checkpoint; block: recomputed layers of each pipeline chunk."""
    fused_lm_head: bool = False
    """Log-probs directly from hidden states: the LM head is applied to a chunk of rows at a time, never all logits.

    Costs one more matrix product with the head per update; its memory does not grow with the micro-batch."""
    router_dtype: Literal["fp32", "fp64", "model"] = "fp32"
    """Precision of the router's scores; model: that of the weights."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens are sent to the ranks of their experts."""

    @property
    def is_exact(self) -> bool:
        """Whether results are compared at float32 accuracy: no matrix product may be computed in TF32 then."""
        return self.dtype == "float32"

    def problems(self) -> Iterator[str]:
        if self.is_exact and self.layer_spec == "transformer_engine":
            yield (
                "layer_spec = transformer_engine with dtype = float32: TransformerEngine computes float32 matrix products in "
                "TF32, with 10 bits of mantissa; use auto or local, or dtype = bfloat16"
            )


class DataConfig(Section):
    """Prompts to train on."""

    train: Path
    """jsonl or parquet with one prompt per row."""
    prompt_key: str = "auto"
    """The prompt's key in a row, or a path like extra_info.question; auto: the first known (docs/guides/data_and_reward.md)."""
    label_key: str = "auto"
    """As prompt_key, for the label: e.g. reward_model.ground_truth, or answers.0 for the first of a list."""
    template: str = "{prompt}"
    """Text around each prompt (of messages, the last one), e.g. "{prompt}\\n\\nPut the final answer within \\\\boxed{}."."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; False feeds the text as it is."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. { enable_thinking = false }."""
    max_prompt_tokens: Positive = 2048
    """Longest prompt, the chat template included."""
    on_long_prompt: Literal["stop", "drop"] = "stop"
    """A prompt longer than that stops the run, or is dropped and counted."""
    shuffle: bool = True
    """Draw prompts in a new order every epoch, by run.seed."""
    max_metadata_bytes: Count = 65536
    """Longest metadata of a row, its further columns as JSON, which reward functions get; 0: keep none."""

    def problems(self) -> Iterator[str]:
        if self.template.count("{prompt}") != 1:
            yield f"template = {self.template!r} must contain {{prompt}} once: that is where the prompt goes"


class BatchConfig(Section):
    """Which responses a step trains on (DAPO, arXiv 2503.14476); all off by default."""

    dynamic_sampling: bool = False
    """Replace groups whose responses all get the same reward by newly sampled ones: their advantages are 0."""
    max_sampling_rounds: Positive = 4
    """dynamic_sampling: draws after the first; groups still missing after that are filled with groups of equal rewards."""
    overlong_cache: Count = 0
    """Overlong shaping: within this many tokens of rollout.max_response_tokens the reward falls, by up to 1; 0 = off."""
    length_penalty: NotNegative = 0.0
    """Length shaping: subtracted from the reward, times length / rollout.max_response_tokens; 0 = off."""
    filter_truncated: bool = False
    """Overlong filtering: responses that reached the length limit leave the loss and its denominators."""


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["auto"] | AdvantageKind = "auto"
    """auto: that of the loss preset (minirl: mean).  Formulas: batch/advantage.py."""
    rewards: dict[str, Finite] = Field(default_factory=dict)
    """kind = per_reward (GDPO): weight of each reward, by the name of a metric that reward.function returns."""

    @field_validator("kind", mode="before")
    @classmethod
    def check_kind(cls, value: object) -> object:
        if value == "remax":
            raise ValueError(
                "is not supported: its baseline is the reward of a greedy response to the prompt, one more to be sampled that is "
                "not trained on (docs/concepts/formulation.md#one-kernel); set kind = leave_one_out, whose baseline is the mean "
                "reward of the prompt's other responses"
            )
        return value

    def problems(self) -> Iterator[str]:
        if self.kind == "per_reward" and len(self.rewards) < 2:
            yield (
                f"kind = per_reward needs rewards with at least 2 names, got {list(self.rewards)}: write rewards = "
                "{ correct = 1.0, format = 0.5 }, names of metrics that reward.function returns; or set kind = std, which is for "
                "one reward"
            )
        if self.rewards and self.kind != "per_reward":
            yield f"rewards has no effect with kind = {self.kind}: set kind = per_reward, or remove it"


class ReplayConfig(Section):
    """Routing replay: which experts training uses."""

    mode: Literal["none", "R2", "R3"] = "R3"
    """Source of the experts: none = the live router; R2 = the old-logprob pass; R3 = the rollout."""
    measure: bool = True
    """Compare the live top-k with the rollout's experts in the old-logprob pass (needs routes from the server)."""
    on_missing_route: Literal["error", "live", "mask_token", "drop_sample"] = "error"
    """What to do with a token for which the server sent no route: error = stop the run; live = the router chooses; mask_token =
    live, and the token it predicts leaves the loss; drop_sample = sample the response again."""
    missing_route_budget: Share = 0.01
    """Largest share of a step's response tokens (separately: of its prompt tokens) without a route; above it the run stops.
    drop_sample: largest share of samples dropped for that.  With batch.dynamic_sampling: of all draws of the step together."""


class LossConfig(Section):
    """The policy loss: a preset, and overrides of its switches (docs/concepts/formulation.md)."""

    name: str = "minirl"
    """A preset, or `package.module:function` (docs/guides/algorithms.md)."""
    weight: presets.Ratio | None = None
    weight_level: presets.Level | None = None
    weight_mode: presets.WeightMode | None = None
    weight_low: Bound | None = None
    weight_high: Annotated[float, Field(gt=0)] | None = None
    """minirl: 5, the upper truncation of the importance weight pi/mu; inf = no truncation."""
    mask: presets.Ratio | None = None
    mask_low: Bound | None = None
    mask_high: Bound | None = None
    clip: presets.ClipKind | None = None
    clip_anchor: presets.ClipAnchor | None = None
    clip_level: presets.Level | None = None
    clip_low: Bound | None = None
    clip_high: Bound | None = None
    router_shift: bool | None = None
    shift_floor: Share | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reject: presets.Ratio | None = None
    reject_level: presets.RejectLevel | None = None
    reject_low: Bound | None = None
    reject_high: Bound | None = None
    reject_only: presets.RejectOnly | None = None
    veto: presets.Ratio | None = None
    veto_low: Bound | None = None
    veto_high: Bound | None = None
    form: presets.Form | None = None
    form_level: presets.FormLevel | None = None
    tau_positive: AboveZero | None = None
    tau_negative: AboveZero | None = None
    delta: AboveZero | None = None
    penalty: presets.Penalty | None = None
    penalty_coef: NotNegative | None = None
    penalty_dead_zone: NotNegative | None = None
    select: presets.Select | None = None
    select_share: Annotated[float, Field(gt=0, le=1)] | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    aggregation: presets.Aggregation | None = None
    scale: AboveZero = 1.0
    """Constant factor on the loss, e.g. 1 / max_response_tokens; never data-dependent."""
    entropy_coef: Finite = 0.0
    """Bonus on the full-vocabulary entropy, per token; 0 = off."""
    kl_coef: NotNegative = 0.0
    """Penalty on the KL to the model as loaded, per token; 0 = off.  Costs one more forward pass per mini-batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL, from the log-ratio of a token."""
    kl_weight: Literal["none", "staleness", "total"] = "none"
    """Multiplies it by pi/pi_old or pi/mu, with gradient: unbiased off policy, in value and gradient (DeepSeek-V3.2)."""

    @property
    def switches(self) -> LossSpec:
        """The preset's switches, with those set here."""
        names = {field.name for field in fields(LossSpec)}
        return replace(PRESETS.get(self.name, LossSpec()), **self.model_dump(include=names, exclude_none=True))

    @property
    def corrects_age(self) -> bool:
        """Whether the gradient of a token is weighted by a ratio to mu, the weights that sampled it, which may be older than
        pi_old; of a custom loss that is not known."""
        found = self.switches
        return (
            ":" in self.name
            or found.weight in ("total", "train_infer")
            or (found.form != "logp" and found.clip_anchor == "rollout")
        )

    def problems(self) -> Iterator[str]:
        if ":" in self.name:  # a custom loss may read any switch
            return
        if self.name not in PRESETS:  # str, not Literal: package.module:function is a name too
            yield f"name = {self.name!r} is not a known loss{nearest(self.name, list(PRESETS))}; or package.module:function"
        loss_rules.check(self.name, self.switches, given={key for key, value in self if value is not None})


class OptimConfig(Section):
    """Adam and its learning rate."""

    lr: NotNegative = 1e-6
    """Learning rate; 0 is allowed (measurement runs)."""
    beta1: Beta = 0.9
    """Of Adam."""
    beta2: Beta = 0.95
    """Of Adam."""
    eps: AboveZero = 1e-8
    """Of Adam."""
    weight_decay: NotNegative = 0.0
    """Of AdamW; biases and norms have none."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it.  0 = no limit."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0, linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine decay to 0 at the last update."""
    distributed: bool = True
    """megatron-core's distributed optimizer (state sharded over data-parallel ranks)."""
    max_skipped_updates: Positive = 3
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""


class ParallelConfig(Section):
    """How the model is spread over ranks."""

    tp: Positive = 1
    """Tensor parallel size."""
    pp: Positive = 1
    """Pipeline parallel size."""
    vp: Positive = 1
    """Virtual pipeline stages per pipeline rank."""
    cp: Positive = 1
    """Context parallel size."""
    ep: Positive = 1
    """Expert parallel size."""
    layers_per_stage: tuple[Positive, ...] = ()
    """Decoder layers of each of the pp x vp stages, in forward order; stage i is on pipeline rank i % pp.

    Default: equal shares."""
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

    def problems(self) -> Iterator[str]:
        if self.vp > 1 and self.pp == 1:
            yield f"parallel.vp = {self.vp} needs parallel.pp > 1: it interleaves pipeline stages"
        stages = self.pp * self.vp  # every pipeline rank holds vp of them
        if self.layers_per_stage and len(self.layers_per_stage) != stages:
            yield (
                f"parallel.layers_per_stage = {list(self.layers_per_stage)} must name {stages} stages = parallel.pp x vp: write "
                f"{stages} numbers"
            )
        if self.sequence_parallel and self.tp == 1:
            yield (
                "parallel.sequence_parallel = true has no effect with parallel.tp = 1: it shards rows over tensor ranks; remove "
                "the key, or set tp > 1"
            )
        # without it core's MoE works only for ep = 1 with etp = 1, and etp defaults to tp
        if self.sequence_parallel is False and self.tp > 1 and (self.ep > 1 or self.expert_tp > 1):
            yield "parallel.sequence_parallel = false with tp > 1: megatron-core's MoE needs it; remove the key"


class MegatronConfig(Section):
    """Fields of megatron-core by their own names: of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig.

    Any field that neither the checkpoint nor another setting defines, for example moe_permute_fusion, recompute_modules,
    overlap_grad_reduce, gradient_accumulation_fusion.  Types and names are those of the installed version.  A field with which
    routing replay is not exact is refused; the log names those with which it is untested.
    """

    model_config = ConfigDict(
        extra="allow"
    )  # engine/core_fields.py checks names and types: this package imports no core

    @property
    def fields(self) -> dict[str, object]:
        """Field of core -> value as written."""
        return dict(self.model_extra or {})


class EvalConfig(Section):
    """Evaluation between steps, and of a checkpoint."""

    sets: dict[str, Path] = Field(default_factory=dict)
    """Name -> prompt file; metrics appear as eval/NAME/avg@k."""
    every: Count = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    samples: Positive = 4
    """n: responses to each prompt, the k of avg@k and of one pass@k."""
    pass_at: tuple[Positive, ...] = ()
    """Other k of pass@k, each at most `samples`; all are estimated from the same samples."""
    temperature: NotNegative = 1.0
    """Sampling temperature in evaluation; 0 = greedy."""
    max_prompts: Positive | None = None
    """Prompts taken from each set; default: all."""
    max_response_tokens: Positive | None = None
    """Default: rollout.max_response_tokens."""
    prompt_key: str | None = None
    """prompt_key of the evaluation files; default: that of [data]."""
    label_key: str | None = None
    """label_key of the evaluation files; default: that of [data]."""
    template: str | None = None
    """template of the evaluation files; default: that of [data]."""

    def measures(self, metric: str) -> bool:
        """Whether an evaluation may have `metric`, eval/NAME/avg@4 or eval/NAME/reward/METRIC (see evaluate.summarize)."""
        sizes = (f"avg@{self.samples}", *(f"pass@{k}" for k in (self.samples, *self.pass_at)))
        known = {"response_length_mean", "truncated_frac", "failed_frac"}
        known |= {f"{size}{end}" for size in sizes for end in ("", "_low", "_high")}
        of_sets = [metric.removeprefix(f"eval/{name}/") for name in self.sets if metric.startswith(f"eval/{name}/")]
        return any(each in known or each.startswith(("reward/", "episode/")) for each in of_sets)

    def problems(self) -> Iterator[str]:
        if "" in self.sets:
            yield f"sets has a file without a name, {self.sets['']}: metrics are eval/NAME/avg@k; give it a name"
        if any(k > self.samples for k in self.pass_at):
            yield f"pass_at = {list(self.pass_at)} with samples = {self.samples}: pass@k needs at least k samples; raise samples"
        if self.temperature == 0 and self.samples > 1:
            yield f"temperature = 0 gives every prompt samples = {self.samples} equal responses; set samples = 1"


class CheckpointConfig(Section):
    """When to save, what to keep, and what to continue from (docs/guides/checkpoints.md)."""

    every: Count = 0
    """Steps between checkpoints; 0 = only after the last step."""
    resume: bool = True
    """Continue from the newest checkpoint in the run directory, if there is one."""
    require: bool = False
    """Stop if there is nothing to resume, instead of starting over; `--resume` sets it."""
    load: Path | None = None
    """The checkpoint to continue from, of this or another run directory, instead of the newest."""
    allow_changes: tuple[str, ...] = ()
    """Keys (shell patterns) that may differ from the checkpoint's although they change training."""
    async_save: bool = False
    """Write in the background; costs a copy of weights and optimizer state in host memory."""
    keep_last: Count = 0
    """Number of latest checkpoints to keep; 0 = all."""
    keep_every: Count = 0
    """keep_last > 0: also keep those whose step is a multiple of this; 0 = none."""
    best_metric: str | None = None
    """keep_last > 0: also keep the best checkpoint by this metric, e.g. eval/NAME/avg@4 (docs/reference/metrics.md)."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the best value of best_metric is the largest or the smallest."""
    grace_seconds: AutoSeconds = "auto"
    """Seconds from SIGTERM or SIGUSR1 for the run to save and exit with code 85; auto: 25 on the CPU and under plain torchrun,
    which kills its ranks after 30, else 600 on a GPU.  `megatron-rl launch` waits for up to 3,600."""
    export_hf: bool = True
    """Write the trained model as an HF checkpoint at the end."""

    def problems(self) -> Iterator[str]:
        if not self.resume and (self.require or self.load is not None):
            key = "require = true" if self.require else f"load = {self.load}"
            yield f"resume = false contradicts {key}; remove one of them"
        for key in ("keep_every", "best_metric"):
            if getattr(self, key) and not self.keep_last:
                yield f"{key} = {getattr(self, key)} has no effect: keep_last = 0 keeps all; set keep_last"
        if self.best_metric and (new := new_metric(self.best_metric)) != self.best_metric:
            yield f"best_metric = {self.best_metric}: the metric was renamed to {new}; use the new name"
