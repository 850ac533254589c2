"""Rules of on-policy distillation: what a teacher's log-probs can be compared with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.base import nearest
from megatron_rl.config.sections.rollout import MOST_KEPT


def teacher_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with teachers, or with an advantage that needs one."""
    form, top_k = cfg.loss.teacher_form, cfg.loss.teacher_top_k
    if (form == "token") != (top_k == 0):
        yield (
            f"loss.teacher_form = {form} with loss.teacher_top_k = {top_k}: reverse and forward sum"
            " over the teacher's most probable tokens, token needs none; set both, e.g. to reverse"
            " and 16, or neither"
        )
    if top_k > MOST_KEPT:
        yield f"loss.teacher_top_k = {top_k}: must be {MOST_KEPT} or less; lower it"
    if form != "token" and not cfg.teachers.with_servers:
        yield (
            f"loss.teacher_form = {form} has no effect without a teacher; add [teachers.NAME] with"
            " urls or path, or remove it"
        )
    if not cfg.teachers.with_servers:
        if cfg.advantage.weight == 0:
            yield (
                "advantage.weight = 0 without a teacher: nothing would be learned; set it above 0,"
                " or add [teachers.NAME] with urls or path"
            )
        for name in cfg.teachers.by_name:
            yield (
                f"teachers.{name} has neither urls nor path, and there is no teacher; set one of"
                " them, or remove it"
            )
        return
    if cfg.is_sft:
        yield "[teachers] has no effect with loss.name = sft: nothing is sampled; remove it"
    yield from source_problems(cfg)
    yield from distribution_problems(cfg)


def source_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with the route from a source of data.train to its teacher."""
    tables, known = cfg.teachers.by_name, cfg.data.source_names
    teacher_of: dict[str, str] = {}
    for name, teacher in tables.items():
        if not teacher.sources and len(tables) > 1:
            yield (
                f"teachers.{name} has no sources, and there are {len(tables)} tables: set the"
                " sources of data.train that it scores"
            )
        for source in teacher.sources:
            if source not in known:
                hint = nearest(source, known) if known else "; data.train is one file; remove it"
                yield f"teachers.{name}.sources has {source!r}, no source of data.train{hint}"
            if source in teacher_of:
                yield (
                    f"source {source!r} is in teachers.{teacher_of[source]} and teachers.{name}: a"
                    " token has one teacher; remove it from one of them"
                )
            teacher_of[source] = name
    scores_all = len(tables) == 1 and not next(iter(tables.values())).sources
    for source in known:
        if source not in teacher_of and not scores_all:
            yield (
                f"source {source!r} of data.train has no teacher: name it in the sources of one;"
                " to learn it from rewards alone, in those of a table without urls and path"
            )


def distribution_problems(cfg: AllSections) -> Iterator[str]:
    """Yield settings with which the teacher's log-probs are not of the student's distribution."""
    rollout = cfg.rollout
    if rollout.temperature != 1:
        yield (
            f"rollout.temperature = {rollout.temperature:g} with a teacher: SGLang returns the"
            " log-probs of given tokens at temperature 1, and the student's would be of another"
            " temperature; set it to 1"
        )
    if rollout.truncation is not None:
        yield (
            "rollout.top_p, top_k or min_p with a teacher: the student's log-probs are renormalised"
            " over kept sets, and the teacher's are not: their difference would not be 0 where both"
            " models are equal; remove them"
        )
    if cfg.batch.dynamic_sampling:
        yield (
            "batch.dynamic_sampling with a teacher: groups of equal rewards have something to learn"
            " from it, and would be replaced; set it to false"
        )
    for name, teacher in cfg.teachers.with_servers.items():
        for url in set(map(without_slash, teacher.urls)) & set(map(without_slash, rollout.urls)):
            yield (
                f"teachers.{name}.urls has {url} of rollout.urls: it gets the student's weights,"
                " which would be their own teacher; start another server"
            )


def without_slash(url: str) -> str:
    return url.removesuffix("/")
