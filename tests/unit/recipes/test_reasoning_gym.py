"""The recipe reasoning-gym: rows of the real package, its scorers as the reward, and bad input.

`make test-recipes` installs the package, and runs the tests that are skipped without it.
"""

import importlib.util
import json
import subprocess
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.recipes import new
from megatron_rl.recipes.prepare import main
from megatron_rl.reward import Episode, LabelError
from tests.unit.recipes.material import read, write

FOLDER = new.recipes()["reasoning-gym"]
NAMES = ("generate", "prepare", "reward")
SETS = "[sets]\ntest = 3\ntrain = 20\n"
SUMS = "[generators.chain_sum]\nmax_digits = 1\nmin_digits = 1\n"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: make test-recipes",
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The project as the current folder; import_module imports its files."""
    assert new.main([str(tmp_path / "p"), "--recipe", "reasoning-gym"]) == 0
    monkeypatch.chdir(tmp_path / "p")
    monkeypatch.syspath_prepend(str(tmp_path / "p"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'p'}:{':'.join(filter(None, sys.path))}")
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "p"
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def prepare(files, capsys):
    """prepare(content of generators.toml, arguments): (exit status, what was printed)."""

    def run(generators, *arguments):
        Path("generators.toml").write_text(generators)
        sources = import_module("prepare").sources(Path("generators.toml"))
        solution = import_module("prepare").solution
        capsys.readouterr()
        status = main(sources, solution, [*map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@needs_package
def test_rows_are_generated_checked_and_scored(prepare):
    status, text = prepare("seed = 7\n" + SETS + SUMS + "[generators.gcd]\nweight = 2\n")
    assert status == 0, text
    assert " rows: right answers get 1.00 on average" in text
    assert "train: 20 rows of reasoning-gym" in text and "WARNING" not in text
    rows = read(load_config("config.toml").data.train)
    kinds = {row["metadata"]["source_dataset"] for row in rows}
    assert kinds == {"chain_sum", "gcd"} and len(rows) >= 15
    reward = import_module("reward")
    for row in rows:
        response, columns = f"so <answer> {row['label']}\n</answer>", {"metadata": row["metadata"]}
        scored = reward.score(Episode(row["prompt"], response, row["label"], metadata=columns))
        assert scored.value == scored.metrics[row["metadata"]["source_dataset"]] == 1


@needs_package
def test_the_same_seed_gives_the_same_rows_and_sets_share_none(files):
    generate = import_module("generate")

    def rows(seed, name, sets):
        Path("g.toml").write_text(f"seed = {seed}\n[sets]\n{sets}\n[generators.chain_sum]\n")
        return list(generate.rows_of_set(generate.read_generators(Path("g.toml")), name))

    both = "test = 3\ntrain = 5"
    first = rows(1, "train", both)
    assert first == rows(1, "train", both) != rows(900, "train", both)
    # the package draws item i with seed + i: the next seed begins one row later
    assert [row["question"] for row in rows(2, "train", both)][:4] == [
        row["question"] for row in first
    ][1:]
    stream = rows(1, "train", "train = 8")
    assert [*rows(1, "test", both), *first] == stream


@needs_package
@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<answer>12</answer>", 1.0),
        ("<answer>7</answer> no, <answer>12</answer>", 1.0),
        ("<answer>12</answer> no, <answer>7</answer>", 0.0),
        ("12", 0.0),
        ("<answer>12", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
        ("<answer>twelve</answer>", 0.0),
    ],
)
def test_the_last_answer_is_scored(response, value, files):
    score = import_module("reward").score
    metadata = {"metadata": {"source_dataset": "chain_sum"}}
    assert score(Episode("5 + 7 =", response, "12", metadata=metadata)).value == value


@needs_package
def test_a_bare_answer_and_one_of_another_form(files):
    reward = import_module("reward")
    metadata = {"metadata": {"source_dataset": "chain_sum"}}
    assert reward.score_bare(Episode("5 + 7 =", " 12 ", "12", metadata=metadata)).value == 1
    metadata = {"metadata": {"source_dataset": "prime_factorization"}}
    scored = reward.score(Episode("4", "<answer>two</answer>", "2", metadata=metadata))
    assert scored.value == 0 and scored.metrics == {"prime_factorization": 0, "unparsed": 1}
    for bad, message in (({}, "source_dataset"), ({"source_dataset": "gcm"}, "gcm")):
        with pytest.raises(LabelError, match=message):
            reward.score(Episode("", "", "1", metadata={"metadata": bad}))


@needs_package
def test_every_generator_can_be_used_or_is_refused_by_the_readmes_list(files):
    from reasoning_gym.factory import DATASETS

    generate, prepare = import_module("generate"), import_module("prepare")
    refused = set()
    for name in DATASETS:
        generators = generate.Generators(1, {"train": 2}, {name: {}})
        try:
            for row in islice(generate.rows_of_set(generators, "train"), 2):
                if not isinstance(row["answer"], str):
                    raise ValueError("no answer")
                prepare.convert(json.loads(json.dumps(row)))
        except (ValueError, LabelError):
            refused.add(name)
    without_answer = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    assert refused == generate.EVALUATED | without_answer | {"arc_agi", "rearc", "composite"}
    assert len(generate.EVALUATED) == 9 and len(DATASETS) == 106


@needs_package
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[generators.chain_sun]", "generators.chain_sun: Dataset 'chain_sun' not registered"),
        ("[generators.gcd]\nmax_number = 3", "generators.gcd: GCDConfig.__init__() got an unexp"),
        ("[generators.gcd]\nmin_numbers = 9\nmax_numbers = 3", "generators.gcd: max_numbers must"),
        ("[generators.arc_agi]", "its own answer 0.05; leave arc_agi out"),
        ("[generators.graph_color]", "'answer' must be text, got null None"),
    ],
)
def test_what_the_package_refuses_is_named_and_nothing_is_written(settings, message, prepare):
    status, text = prepare(SETS + settings)
    assert status == 1 and message in text, text
    assert "prepare.py: nothing was written" in text and not Path("data").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SETS + "[generators", "not TOML"),
        (SETS + SUMS + SUMS, "not TOML: Cannot declare ('generators', 'chain_sum') twice"),
        ("", "[sets] is missing or empty"),
        (SETS, "[generators] is missing or empty"),
        ("seeds = 1\n" + SETS + SUMS, "seeds: unknown; keys: seed, sets, generators"),
        ("seed = 'a'\n" + SETS + SUMS, "seed = 'a': must be a whole number, 0 or more"),
        ("seed = true\n" + SETS + SUMS, "seed = True: must be a whole number"),
        ("[sets]\ntrain = 0\n" + SUMS, "sets.train = 0: must be a number of rows, 1 or more"),
        ("[sets]\ntrain = 2.5\n" + SUMS, "sets.train = 2.5: must be a number of rows"),
        ("[sets]\ntest = 1\n" + SUMS, "sets has no train, which config.toml trains on"),
        (SETS + SUMS + "weight = 0", "generators.chain_sum: weight = 0: must be a number above 0"),
        (SETS + SUMS + "weight = 'a'", "weight = 'a': must be a number above 0"),
        (SETS + SUMS + "size = 9", "generators.chain_sum: size is that of all generators"),
        (SETS + "[generators]\ngcd = 3", "generators.gcd: got 3; its settings must be a table"),
        (SETS + "[generators.countdown]", "generators.countdown: its scorer evaluates the answer"),
    ],
)
def test_a_broken_file_of_generators_is_named(content, message, files):
    path = Path("generators.toml")
    path.write_text(content)
    with pytest.raises(ValueError) as refused:
        import_module("generate").read_generators(path)
    assert str(refused.value).startswith("generators.toml: ") and message in str(refused.value)


def test_a_missing_package_is_named(files, monkeypatch):
    (files / "reasoning_gym.py").write_text("raise ModuleNotFoundError('No module of it')")
    done = subprocess.run([sys.executable, "prepare.py"], capture_output=True, text=True)
    assert done.returncode == 1 and not Path("data").exists()
    assert done.stderr == (
        "prepare.py: the package reasoning-gym is missing (No module of it): pip install"
        " reasoning-gym\n"
    )


ROW = {"question": "5 + 7 =", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
EVIL = ROW | {"metadata": {"source_dataset": "countdown"}}


@needs_package
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "No such file"),
        ([], "has no rows; copy it again"),
        ([ROW, ROW | {"answer": 12}], "line 2: 'answer' must be text, got int 12"),
        ([ROW | {"metadata": "chain_sum"}], "'metadata' must be an object"),
        ([ROW | {"metadata": {}}], "Dataset 'None' not registered"),
        ([EVIL], "the scorer of countdown evaluates the answer as Python, so it is not used"),
        ([ROW | {"answer": " "}], "'label' must be text that is not empty"),
        ([{"instruction": "1+1", "output": "2"}], "are those of no known prompt file"),
    ],
)
def test_broken_files_are_named_and_nothing_is_written(rows, message, prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    if rows is not None:
        write(path, rows)
    status, text = prepare(SETS + SUMS, "--from", path)
    assert status == 1 and message in text, text
    assert "prepare.py: nothing was written" in text and not Path("data").exists()


@needs_package
def test_repeated_rows_of_a_file_are_left_out_and_counted(prepare, tmp_path):
    other = ROW | {"question": "6 + 7 =", "answer": "13"}
    path = write(tmp_path / "a.jsonl", [ROW, ROW, other])
    status, text = prepare(SETS + SUMS, "--from", path)
    assert status == 0 and "left out 1: its prompt is also in an earlier row (train-2)" in text


def test_the_laptops_configuration_is_complete(files):
    cfg = load_config("laptop.toml")
    assert cfg.reward.function == "reward:score_bare" and cfg.data.train == Path(
        "laptop_data/train.jsonl"
    )
    generators = import_module("generate").read_generators(Path("laptop_generators.toml"))
    assert list(generators.settings) == ["chain_sum"]
