"""[data], [eval]: the prompts to train on and to evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import Count, Finite, NotNegative, Positive, Section
from megatron_rl.config.sections.rollout import ALL_TOKENS, Truncation
from megatron_rl.config.sections.train_sources import TrainSource, names_of, sources_of


class DataConfig(Section):
    """Prompts to train on."""

    train: Path | tuple[TrainSource, ...]
    """jsonl or parquet with one prompt per row; or several files, a table [[data.train]] with name,
    path and weight for each (docs/guides/data_and_reward.md#several-sources)."""
    # places in a row
    prompt_key: str = "auto"
    """The prompt's key in a row, or a path like extra_info.question; auto: the first known
    (docs/guides/data_and_reward.md)."""
    label_key: str = "auto"
    """Column or path of the label, as of prompt_key."""
    # text of a prompt
    template: str = "{prompt}"
    """Text around each prompt (of messages, the last one), e.g. "{prompt}\\n\\nPut the final answer
    within \\\\boxed{}."."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; False feeds the text as it is."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. { enable_thinking = false }."""
    # choice and order of prompts
    max_prompt_tokens: Positive = 2048
    """Longest prompt, the chat template included."""
    on_long_prompt: Literal["stop", "drop"] = "stop"
    """A prompt longer than that stops the run, or is dropped and counted."""
    shuffle: bool = True
    """Draw prompts in a new order every epoch, by run.seed."""
    sampling: Literal["uniform", "pass_rate"] = "uniform"
    """uniform: an epoch has every prompt once. pass_rate: prompts with a pass rate near 0 or 1 are
    drawn less often, which changes the objective
    (docs/guides/data_and_reward.md#prompts-by-pass-rate)."""
    pass_reward: Finite = 0.5
    """A response passes with at least this reward."""
    # where all prompts have this chance, drawing one takes 1 / least_chance looks at a prompt
    least_chance: Annotated[Finite, Field(ge=0.001, le=1)] = 0.1
    """Chance of a prompt to be drawn in an epoch where all or none of its responses passed."""
    max_metadata_bytes: Count = 65536
    """Longest metadata of a row, its further columns as JSON; 0: keep none."""

    @model_validator(mode="before")
    @classmethod
    def read_sources(cls, values: object) -> object:
        """Read the tables of `train` first: errors of a union would not name the source."""
        if not isinstance(values, Mapping) or "train" not in values:
            return values
        return {**values, "train": sources_of(values["train"])}

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources, () where `train` is one file."""
        return names_of(self.train)

    def of_source(self, name: str) -> DataConfig:
        """The way to read the file of a source: these settings, with those of its table."""
        sources = () if isinstance(self.train, Path) else self.train
        keys = {"prompt_key", "label_key", "template"}
        for source in (source for source in sources if source.name == name):
            changed = source.model_dump(include=keys, exclude_none=True)
            return DataConfig.model_validate(self.model_dump() | changed)
        return self

    def problems(self) -> Iterator[str]:
        templates = {"template": self.template}
        if not isinstance(self.train, Path):
            templates |= {
                f"train, source {source.name}: template": source.template
                for source in self.train
                if source.template is not None
            }
        for name, template in templates.items():
            if template.count("{prompt}") != 1:
                yield (
                    f"{name} = {template!r} must contain {{prompt}} once: that is where the "
                    "prompt goes"
                )


class EvalConfig(Section):
    """Evaluation between steps, and of a checkpoint."""

    sets: dict[str, Path] = Field(default_factory=dict)
    """Name -> prompt file.  A set with the name of a source of data.train is read with that
    source's keys and template."""
    every: Count = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    samples: Positive = 4
    """n: responses to each prompt, the k of avg@k and of one pass@k."""
    pass_at: tuple[Positive, ...] = ()
    """Other k of pass@k, each at most `samples`; all are estimated from the same samples."""
    temperature: NotNegative = 1.0
    """Sampling temperature in evaluation; 0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample in evaluation from the smallest set of tokens with this much probability.  A model
    that is trained with rollout.top_p has learned nothing about the other tokens."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample in evaluation from the k most probable tokens; -1: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample in evaluation from the tokens with at least this share of the most probable token's
    probability."""
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

    @property
    def truncation(self) -> Truncation | None:
        """The limits of evaluation's samples; None if these come from the entire vocabulary."""
        limits = Truncation(self.top_p, self.top_k, self.min_p)
        return None if limits == ALL_TOKENS else limits

    def measures(self, metric: str) -> bool:
        """Return True if an evaluation may have `metric`, e.g. eval/NAME/reward/METRIC.

        evaluate.summarize makes these metrics.
        """
        sizes = (f"avg@{self.samples}", *(f"pass@{k}" for k in (self.samples, *self.pass_at)))
        known = {"response_length_mean", "truncated_frac", "failed_frac"}
        known |= {f"{size}{end}" for size in sizes for end in ("", "_low", "_high")}
        for prefix in (f"eval/{name}/" for name in self.sets):
            name = metric.removeprefix(prefix)
            # the metrics of users' functions are known only after a call: any name passes
            if name != metric and (name in known or name.startswith(("reward/", "episode/"))):
                return True
        return False

    def problems(self) -> Iterator[str]:
        if "" in self.sets:
            yield (
                f"sets has a file without a name, {self.sets['']}: metrics are eval/NAME/avg@k; "
                "give it a name"
            )
        if any(k > self.samples for k in self.pass_at):
            yield (
                f"pass_at = {list(self.pass_at)} with samples = {self.samples}: pass@k needs at "
                "least k samples; raise samples"
            )
        if self.top_k == 0:
            yield "top_k = 0: must be -1 for all tokens, or at least 1; set top_k = -1"
        if self.temperature == 0 and self.samples > 1:
            yield (
                f"temperature = 0 gives every prompt samples = {self.samples} equal responses; set "
                "samples = 1"
            )
