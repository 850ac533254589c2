"""Bad input of every recipe: a file that is missing, empty, doubled, mistyped or foreign, and a
configuration that is wrong, is named before anything is written.

test_reasoning_gym.py has the same for the recipe that generates its rows.
"""

import importlib.util
from pathlib import Path

import pytest

from megatron_rl.recipes import new
from megatron_rl.recipes.prepare import main
from tests.unit.recipes.material import DATA, read, write
from tests.unit.recipes.test_code import ROWS

TRAIN = {name: sets["train"] for name, sets in DATA.items()} | {"code": ROWS}
RECIPES = sorted(TRAIN)
FOREIGN = [{"instruction": "Add 1 and 1", "output": "2"}]


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare(recipe, arguments): (exit status, what was printed, the module prepare.py)."""

    def run(recipe, *arguments):
        if not (tmp_path / "p").exists():
            assert new.main([str(tmp_path / "p"), "--recipe", recipe]) == 0
        monkeypatch.chdir(tmp_path / "p")
        spec = importlib.util.spec_from_file_location(f"bad_{recipe}", "prepare.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        capsys.readouterr()
        status = main(module.SOURCES, None, [*map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err, module

    return run


def test_every_recipe_is_in_the_table():
    assert {*RECIPES, "reasoning-gym"} == set(new.recipes())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "{path}: cannot be read: No such file"),
        ([], "train: {path} has no rows; copy it again"),
        (FOREIGN, "its columns ['instruction', 'output'] are those of no known prompt file"),
    ],
    ids=["missing", "empty", "foreign"],
)
def test_a_file_that_cannot_be_used_is_named(recipe, rows, message, prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    if rows is not None:
        write(path, rows)
    refused(prepare(recipe, "--from", path), message.format(path=path))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_column_of_another_type_is_named_with_its_line(recipe, prepare, tmp_path):
    path, rows = tmp_path / "a.jsonl", TRAIN[recipe]
    write(path, rows)
    *_, module = prepare(recipe, "--from", path)
    for written in Path("data").iterdir():
        written.unlink()
    Path("data").rmdir()
    columns = module.SOURCES["train"].columns
    assert columns
    for column in columns:
        write(path, [rows[0], rows[1] | {column: 7}])
        refused(prepare(recipe, "--from", path), f"line 2: {column!r} must be ")
        missing = {key: value for key, value in rows[1].items() if key != column}
        write(path, [rows[0], missing])
        refused(prepare(recipe, "--from", path), f"line 2: key {column!r} is missing")


@pytest.mark.parametrize("recipe", RECIPES)
def test_doubled_rows_are_left_out_and_a_doubled_file_is_refused(recipe, prepare, tmp_path):
    rows = TRAIN[recipe]
    path, copy = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows)
    names = [name for name in prepare(recipe, "--from", path)[2].SOURCES if name != "train"]
    number = len(read(Path("data/train.jsonl")))
    write(path, rows * 2)
    status, text, _ = prepare(recipe, "--from", path)
    assert status == 0 and len(read(Path("data/train.jsonl"))) == number
    assert f"left out {2 * len(rows) - number}: its prompt is also in an earlier row" in text
    Path("data/train.jsonl").unlink()
    write(path, rows)
    status, text, _ = prepare(recipe, "--from", path, f"{names[0]}={copy}")
    assert status == 1 and "have the same content" in text and not list(Path("data").iterdir())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[reward]", "[rewards]"), "did you mean 'reward'"),
        (("function = ", "functoin = "), "did you mean 'function'"),
        (("num_mini_batches = 1", 'num_mini_batches = "one"'), "run.num_mini_batches"),
        (("[run]", "[run"), "config.toml"),
    ],
    ids=["section", "key", "type", "syntax"],
)
def test_a_wrong_configuration_is_named(recipe, change, message, prepare, tmp_path):
    path = write(tmp_path / "a.jsonl", TRAIN[recipe])
    assert new.main([str(tmp_path / "p"), "--recipe", recipe]) == 0
    config = tmp_path / "p/config.toml"
    assert change[0] in config.read_text()
    config.write_text(config.read_text().replace(*change))
    refused(prepare(recipe, "--from", path), message)


def refused(result, message):
    status, text, _ = result
    assert status == 1 and message in text, text
    assert "prepare.py: nothing was written" in text and not Path("data").exists()
