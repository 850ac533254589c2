"""docs/reference/metrics.md lists exactly the metrics that the package emits; links, settings,
options of commands and make targets in the documents exist."""

import ast
import inspect
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path

from megatron_rl.commands import PACKAGES, load
from megatron_rl.config import RewardConfig
from megatron_rl.config.schema import SECTIONS
from megatron_rl.metrics.histogram import HISTOGRAMS
from megatron_rl.replay.mismatch import MismatchReport
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client.counters import RolloutCounters, TeacherCounters

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "*.md", "docs/**/*.md", "examples/**/*.md", "megatron_rl/recipes/*/*.md", "results/*.md",
)  # fmt: skip
PAGES = [page for pattern in FOLDERS for page in ROOT.glob(pattern)]
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it names what was there before
KEYS = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields}
GROUPS = (
    "rollout|reward|teacher|source|data|train|sft|logratio|first_order|replay|routing|optim|time|perf|track"
    "|eval"
)
NAME = re.compile(rf"({GROUPS})/[\w@/]*[\w@]|run/\w+_total")


OPEN = ("megatron", "teachers")


def documented() -> set[str]:
    """The names at the beginning of the list items; an item may have several."""
    text = (ROOT / "docs/reference/metrics.md").read_text()
    items = re.findall(r"^- ((?:`[a-z][^`]*/[^`]+`(?:,\s+)?)+):\s", text, re.MULTILINE)
    return set(re.findall("`([^`]+)`", " ".join(items)))


def family(node: ast.JoinedStr) -> set[str]:
    """The names that a name with a variable part stands for."""
    pattern = "".join(
        str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
    )
    if not re.match(rf"({GROUPS})/", pattern):
        return set()
    known = {
        "routing/*": {f"routing/{field.name}" for field in fields(MismatchReport)},
        "logratio/share/*": {"logratio/share"},
        "train/is_weight_mean/*": {"train/is_weight_mean"},
        "train/clip_frac/*": {"train/clip_frac"},
        "train/penalty_frac/*": {"train/penalty_frac"},
        "rollout/*_total": set(RolloutCounters().totals()),
        "teacher/*_total": set(TeacherCounters().totals()),
        "reward/*_total": set(RewardPool(RewardConfig()).totals()),
        "reward/*": {"reward/NAME"},
        **{
            f"source/*/{name}": {f"source/NAME/{name}"}
            for name in (
                *("groups_frac", "reward_mean", "pass_rate", "epochs"),
                *("zero_advantage_groups_frac", "response_length_mean", "teacher_reverse_kl"),
            )
        },
        "source/*/*": {"source/NAME/sampled_prompts_frac", "source/NAME/draw_chance_mean"},
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
            for name in ("response_length_mean", "truncated_frac", "failed_frac", "loss")
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
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    ):
        return {node.value}
    return family(node) if isinstance(node, ast.JoinedStr) else set()


@cache
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
    return set().union(
        *(first_argument(n, "pop") for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    )


def first_argument(call: ast.Call, *methods: str) -> set[str]:
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in methods and call.args
    return names_of(call.args[0]) if is_method else set()


def mentioned_by(source: str) -> set[str]:
    return {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        for name in names_of(node)
    }


def sources() -> list[str]:
    """Not renamed.py: its names are those of before."""
    others = {"config/renamed.py"}  # former names
    package = ROOT / "megatron_rl"
    return [
        path.read_text()
        for path in package.rglob("*.py")
        if path.relative_to(package).as_posix() not in others
    ]


@cache
def everything(reader) -> set[str]:
    return set().union(*map(reader, sources()))


def spreads() -> set[str]:
    """What the spread of a quantity is reported as; the quantity's own name is none."""
    return {
        f"{name}_{statistic}" for name, statistics in HISTOGRAMS.items() for statistic in statistics
    }


def reported() -> set[str]:
    return (everything(emitted_by) - everything(removed_by) - set(HISTOGRAMS)) | spreads()


def test_every_emitted_metric_is_documented():
    assert reported() - documented() == set()


def test_every_documented_metric_is_emitted():
    assert documented() - reported() == set()


def test_every_metric_that_is_read_is_emitted():
    """The console, the sinks and the report look metrics up by name: a renamed one would silently
    show nothing.
    """
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
        for document in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text())
        if not re.match(r"\w+:", link) and not (document.parent / link).exists()
    ]
    assert not broken


def places(pattern: str) -> Iterator[tuple[str, re.Match]]:
    """(page and line, match) in every document."""
    for page in TODAY:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield from (
                (f"{page.relative_to(ROOT)}:{number}", match)
                for match in re.finditer(pattern, line)
            )


def test_settings_in_documents_exist():
    """`section.key` in code, --section.key, and blocks of TOML.

    The keys of [megatron] are those of megatron-core, those of [teachers] names of the user.
    """
    names = "|".join(section for section in SECTIONS if section not in OPEN)
    found = [(place, m[1]) for place, m in places(rf"(?:`|--)((?:{names})\.[a-z]\w*)(?=[` =\]])")]
    for page in TODAY:
        for block in re.findall(
            r"^ *```toml\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            sections = tomllib.loads(block).items()
            found += [(page.name, f"{section}.{key}") for section, keys in sections for key in keys]
    assert len(found) > 500
    not_settings = {"run.id", "run.lock", "run.name", "run.folder"}  # of a tracker; a file
    not_settings |= {"agent.py", "reward.py", "run.sh"}  # of a recipe
    not_settings |= {  # verl's
        "data.train_batch_size", "reward.custom_reward_function", "rollout.n",
        "rollout.tensor_model_parallel_size",
    }  # fmt: skip
    assert not [
        each
        for each in found
        if each[1] not in KEYS | not_settings and each[1].partition(".")[0] not in OPEN
    ]


def test_options_of_commands_in_documents_exist():
    """Read from the sources: a help would import torch.  Those of launch are torchrun's."""
    found = []
    for place, match in places(r"(?:megatron-rl|megatron_rl\.cli) ([a-z][a-z-]+)((?: [^`|#]*)?)"):
        assert match[1] in chain(*PACKAGES.values()), f"{place}: megatron-rl {match[1]}"
        options = (
            re.findall(r"(?<!\S)(--\w[\w-]*)(?![\w.-])", match[2]) if match[1] != "launch" else []
        )
        found += [(place, match[1], option) for option in options]
    assert len(found) > 60
    for place, command_name, option in found:
        command = load(command_name)
        folder = Path(inspect.getfile(command)).parent
        modules = re.findall(r'"([a-z_.]+)(?::\w+)?"', inspect.getsource(command))
        places_of = [module.removeprefix("megatron_rl.") for module in ["options", *modules]]
        files = [folder / f"{module.replace('.', '/')}.py" for module in places_of]
        text = "".join(file.read_text() for file in files if file.is_file())
        names = (option, option[2:], option[2:].replace("-", "_"))
        assert any(f'"{name}"' in text for name in names), (
            f"{place}: megatron-rl {command_name} {option}"
        )


def test_make_targets_in_documents_exist():
    targets = set(
        re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    )
    found = [(place, match[1]) for place, match in places(r"(?:^|`)make ([a-z][a-z-]+)")]
    assert len(found) > 40 and not [each for each in found if each[1] not in targets]


def test_help_shows_eight_targets_and_help_all_the_others():
    targets = set(
        re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    )
    shown = {}
    for target in ("help", "help-all"):
        done = subprocess.run(
            ["make", target], cwd=ROOT, capture_output=True, text=True, check=True
        )
        shown[target] = re.findall(r"^make ([\w-]+)", done.stdout, re.MULTILINE)
    assert len(shown["help"]) == 8 and shown["help-all"][:8] == shown["help"]
    assert sorted(shown["help-all"]) == sorted(targets - {"help", "help-all", "FORCE"})


def test_documents_start_training_with_the_launcher():
    """Plain torchrun prints its own traceback after every error and loses the exit status."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert not [
        page
        for page in pages
        if re.search(r"torchrun [^\n]*-m megatron_rl\.train", page.read_text())
    ]
