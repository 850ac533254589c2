"""[teachers.NAME]: servers that score what the model samples, for on-policy distillation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError, model_validator

from megatron_rl.config.base import Count, NotNegative, Section
from megatron_rl.config.redact import VARIABLE
from megatron_rl.config.sections.train_sources import NAME, problem_text


class Teacher(Section):
    """One teacher."""

    urls: tuple[str, ...] = ()
    """Running SGLang servers, all with this teacher's model.  With neither urls nor path, its
    sources learn from rewards alone."""
    path: Path | None = None
    """Checkpoint of a teacher that the run serves itself, on the machine of rank 0: one server,
    which starts and ends with the run.  It takes rollout.python, host, max_total_tokens,
    max_running_requests and the time limits from [rollout]."""
    gpus: tuple[Count, ...] = ()
    """GPUs of the server of path; unless server_args sets --tp-size, it is their number.  No
    training rank and no other server may use them."""
    server_args: tuple[str, ...] = ()
    """Further options of SGLang's command line for the server of path."""
    release_memory: bool = False
    """The server of path has GPU memory only while it scores: when a step's responses are sampled,
    before the update, one teacher after the other.  So such teachers may have the same gpus, with
    rollout.release_memory also those of training ranks and rollout servers.  Needs a GPU, and
    nothing that is sampled ahead.  Not run so far on GPUs."""
    sources: tuple[str, ...] = ()
    """Sources of data.train whose responses it scores; may be left out where it is the only
    teacher, which then scores all."""
    beta: NotNegative = 1.0
    """Weight of its term in the advantage of a token."""
    beta_end: NotNegative | None = None
    """The weight after the first beta_steps steps, in which it changes linearly."""
    beta_steps: Count = 0
    """Steps from beta to beta_end."""
    teach: Literal["all", "failures"] = "all"
    """all: it teaches every response; failures: only those with a reward below data.pass_reward."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key, e.g. TEACHER_API_KEY."""

    @property
    def is_served(self) -> bool:
        """True if it has servers, running ones or one that the run starts."""
        return bool(self.urls) or self.path is not None

    def at(self, urls: tuple[str, ...]) -> Teacher:
        """Return the teacher of `path` with the addresses of its running servers."""
        return self.model_copy(update={"urls": urls, "path": None, "gpus": (), "server_args": ()})

    def beta_at(self, step: int) -> float:
        """Return beta in `step`, which counts from 0."""
        if self.beta_end is None or not self.beta_steps:
            return self.beta
        share = min(step / self.beta_steps, 1.0)
        return self.beta + share * (self.beta_end - self.beta)

    def problems(self) -> Iterator[str]:
        if (self.beta_end is None) != (self.beta_steps == 0):
            yield (
                f"beta_end = {self.beta_end} with beta_steps = {self.beta_steps}: a schedule needs"
                " both; set beta_end and beta_steps above 0, or neither"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"urls has {url!r}: must begin with http:// or https://; add it"
        key = self.api_key_env
        if key is not None and not VARIABLE.search(key):
            yield (
                f"api_key_env = {key!r}: must have KEY, TOKEN, SECRET or PASSWORD as a word of its"
                " name, by which logs and files hide its value; rename the variable"
            )
        if len(set(self.urls)) < len(self.urls):
            yield f"urls = {list(self.urls)}: must name every server once; remove the repeated one"
        if self.urls and self.path is not None:
            yield (
                f"urls = {list(self.urls)} with path = {self.path}: a run attaches to running"
                " servers or starts one of path; remove one of them"
            )
        values = {"gpus": list(self.gpus), "server_args": list(self.server_args)}
        values["release_memory"] = self.release_memory
        for key, value in values.items():
            if self.path is None and value:
                text = "true" if value is True else value
                yield f"{key} = {text} has no effect without path; set path, or remove it"
        if not self.is_served and (
            self.beta != 1.0 or self.beta_end is not None or self.teach != "all"
        ):
            yield (
                "urls = []: without a server there is no teacher, and beta, beta_end, beta_steps"
                " and teach have no effect; set urls or path, or remove them"
            )


class TeachersConfig(Section):
    """On-policy distillation: [teachers.NAME] is a teacher, SGLang servers that score the tokens
    that the model sampled (docs/guides/distillation.md).
    """

    # every key is the name of a teacher, and its value a Teacher
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def read_tables(cls, values: object) -> object:
        """Read the tables first: pydantic's errors of an open section would not name the key."""
        if not isinstance(values, Mapping):
            return values
        return {name: teacher_of(str(name), table) for name, table in values.items()}

    @property
    def by_name(self) -> dict[str, Teacher]:
        """The teachers, and the tables without servers, by name."""
        return dict(self.model_extra or {})

    @property
    def with_servers(self) -> dict[str, Teacher]:
        """The teachers by name."""
        return {name: teacher for name, teacher in self.by_name.items() if teacher.is_served}

    @property
    def time_shared(self) -> tuple[str, ...]:
        """The names of the teachers whose servers have GPU memory only while they score."""
        teachers = self.with_servers.items()
        return tuple(name for name, teacher in teachers if teacher.release_memory)

    def only(self, names: Collection[str]) -> TeachersConfig:
        """Return the tables with these names."""
        tables = {name: self.by_name[name] for name in names}
        return TeachersConfig.model_validate(tables)

    def at(self, urls: Mapping[str, tuple[str, ...]]) -> TeachersConfig:
        """Return the teachers, those in `urls` with the addresses of their running servers."""
        served = {name: self.by_name[name].at(addresses) for name, addresses in urls.items()}
        return TeachersConfig.model_validate({**self.by_name, **served})

    def name_for(self, source: str) -> str:
        """Return the name of the teacher that scores responses to prompts of `source`, "" where
        there is none.
        """
        for name, teacher in self.with_servers.items():
            if source in teacher.sources or not teacher.sources:
                return name
        return ""


def teacher_of(name: str, table: object) -> Teacher:
    """Return the teacher of a table.  Raises ValueError that names table, key, value and rule."""
    if isinstance(table, Teacher):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(
            f"teachers.{name} = {table!r}: must be a table; write [teachers.{name}] with urls or"
            " path, and sources"
        )
    if not NAME.fullmatch(name):
        raise ValueError(
            f"teachers has a table {name!r}: a name must be letters, digits, _, - and ., 64 at most"
        )
    try:
        return Teacher.model_validate(table)
    except ValidationError as error:
        problem = problem_text(error.errors()[0], Teacher)
        raise ValueError(f"teachers.{name}: {problem}") from error
