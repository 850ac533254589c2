"""docs/reference/metrics.md lists exactly the metrics that the package emits; links in the documents lead somewhere."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from megatron_rl.metrics.histogram import HISTOGRAMS
from megatron_rl.replay.mismatch import MismatchReport
from megatron_rl.reward.failures import KINDS
from megatron_rl.rollout.client.counters import RolloutCounters

ROOT = Path(__file__).resolve().parents[2]
GROUPS = "rollout|reward|train|logratio|first_order|replay|routing|optim|time|perf|track|eval"
NAME = re.compile(rf"({GROUPS})/[\w@/]*[\w@]")


def documented() -> set[str]:
    return set(re.findall(r"^\| `([^`]+/[^`]+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE))


def family(node: ast.JoinedStr) -> set[str]:
    """The names that a name with a variable part stands for."""
    pattern = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    if not re.match(rf"({GROUPS})/", pattern):
        return set()
    known = {
        "routing/*": {f"routing/{field.name}" for field in fields(MismatchReport)},
        "logratio/share/*": {"logratio/share"},
        "train/is_weight_mean/*": {"train/is_weight_mean"},
        "train/clip_frac/*": {"train/clip_frac"},
        "rollout/*_total": set(RolloutCounters().totals()),
        "reward/*_total": {f"reward/{kind}_total" for kind in ("unformatted", *KINDS)},
        "reward/*": {"reward/NAME"},
        "track/*_failures_total": {"track/NAME_failures_total"},
        **{f"eval/*/{kind}/*": {f"eval/NAME/{kind}/METRIC"} for kind in ("reward", "episode")},
        "time/*": {f"time/{stage}" for stage in timed_stages()},
        **{
            f"eval/*/{kind}@*{end}": {f"eval/NAME/{kind}@k{end}"}
            for kind in ("avg", "pass")
            for end in ("", "_low", "_high")
        },
        **{
            f"eval/*/{name}": {f"eval/NAME/{name}"}
            for name in ("response_length_mean", "truncated_frac", "failed_frac")
        },
    }
    assert pattern in known, f"say in this test which metrics {ast.unparse(node)} stands for"
    return known[pattern]


def timed_stages() -> list[str]:
    """The TIMED tuple of step_meter.py, read without importing the whole program."""
    for node in ast.parse((ROOT / "megatron_rl/trainer/step_meter.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TIMED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("step_meter.py has no TIMED")


def names_of(node: ast.AST | None) -> set[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
        return {node.value}
    return family(node) if isinstance(node, ast.JoinedStr) else set()


def emitted_by(source: str) -> set[str]:
    """Names given to add, add_max or add_total, stored under `x[name] = `, or keys of a dict."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            names |= first_argument(node, "add", "add_max", "add_total")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names |= names_of(node.slice)
        elif isinstance(node, ast.Dict):
            names |= set().union(*map(names_of, node.keys))
        elif isinstance(node, ast.DictComp):
            names |= names_of(node.key)
    return names


def removed_by(source: str) -> set[str]:
    """Names given to pop(...): intermediate values that never leave the step."""
    return set().union(*(first_argument(n, "pop") for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)))


def first_argument(call: ast.Call, *methods: str) -> set[str]:
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in methods and call.args
    return names_of(call.args[0]) if is_method else set()


def mentioned_by(source: str) -> set[str]:
    return {name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) for name in names_of(node)}


def sources() -> list[str]:
    """Not renamed.py: its names are those of before."""
    others = {"config/renamed.py", "viewer/export.py"}  # former names; addresses of pages
    package = ROOT / "megatron_rl"
    return [path.read_text() for path in package.rglob("*.py") if path.relative_to(package).as_posix() not in others]


def everything(reader) -> set[str]:
    return set().union(*map(reader, sources()))


def spreads() -> set[str]:
    """What the spread of a quantity is reported as; the quantity's own name is none."""
    return {f"{name}_{statistic}" for name, statistics in HISTOGRAMS.items() for statistic in statistics}


def reported() -> set[str]:
    return (everything(emitted_by) - everything(removed_by) - set(HISTOGRAMS)) | spreads()


def test_every_emitted_metric_is_documented():
    assert reported() - documented() == set()


def test_every_documented_metric_is_emitted():
    assert documented() - reported() == set()


def test_every_metric_that_is_read_is_emitted():
    """The console, the sinks and the report look metrics up by name: a renamed one would silently show nothing."""
    assert everything(mentioned_by) - everything(emitted_by) - spreads() == set()


def test_the_reader_sees_every_way_of_emitting():
    source = """
sums.add("train/a", 1)
sums.add_max("train/b", 1)
metrics["train/c"] = 1
other = {"train/d": 1} | {f"time/{name}": 0 for name in x}
metrics.pop("train/a")
print(metrics["train/e"])
"""
    times = {f"time/{stage}" for stage in timed_stages()}
    assert times
    assert emitted_by(source) == {"train/a", "train/b", "train/c", "train/d"} | times
    assert removed_by(source) == {"train/a"}
    assert "train/e" in mentioned_by(source)


def test_links_between_documents_lead_somewhere():
    broken = [
        f"{document.relative_to(ROOT)}: {link}"
        for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text())
        if not re.match(r"\w+:", link) and not (document.parent / link).exists()
    ]
    assert not broken
