"""tests/check.py selects the unit tests of a change, and all of them for an unknown place."""

import subprocess

import pytest

from tests.check import REPO, ROOT, SLOW_REPO, UNIT, changed_files, command, selected

EVERYTHING = [REPO, UNIT]


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("megatron_rl/loss/kl.py", ["tests/unit/loss"]),
        ("megatron_rl/loss/removed.py", ["tests/unit/loss"]),
        ("megatron_rl/rollout/client/call.py", ["tests/unit/rollout"]),
        ("megatron_rl/cli.py", ["tests/unit/test_cli.py"]),
        ("tools/megatron_rl_tools/convert/convert_hf.py", ["tests/unit/tools"]),
        ("viewer/megatron_rl_viewer/app.py", ["tests/unit/viewer"]),
        ("viewer/web/src/main.ts", ["tests/unit/viewer"]),
        ("tests/unit/loss/test_kept.py", ["tests/unit/loss/test_kept.py"]),
        ("tests/unit/loss/formulas.py", ["tests/unit/loss"]),
        ("tests/unit/loss/test_removed.py", []),
        ("tests/check.py", ["tests/unit/test_check.py"]),
        ("tests/repo/test_packaging.py", ["tests/repo/test_packaging.py"]),
        ("tests/dist/test_replay.py", []),
        ("docs/install.md", []),
        ("README.md", []),
        ("tools/install.sh", []),
    ],
)
def test_a_change_selects_the_tests_of_its_place(path, tests):
    assert selected([path]) == tests


@pytest.mark.parametrize(
    "path",
    [
        "megatron_rl/records/rollouts.py", "megatron_rl/distributed/ranks.py",
        "megatron_rl/a_new_folder/a.py", "megatron_rl/py.typed", "a_new_folder/a.py",
        "tools/another_package/a.py", "pyproject.toml", "requirements-cpu.txt",
        "tests/conftest.py", "tests/fixtures/a.json", "a_file_without_suffix",
    ],
)  # fmt: skip
def test_a_change_to_an_unknown_place_selects_everything(path, capsys):
    assert selected(["megatron_rl/loss/kl.py", path]) == EVERYTHING
    assert f"{path} may change anything" in capsys.readouterr().out


def test_a_helper_selects_the_tests_that_import_it_also_through_another_helper(tmp_path):
    sources = {
        "tests/tiny.py": "",
        "tests/saved.py": "from tests import shapes, tiny",
        "tests/unit/a/test_one.py": "from tests.tiny import x",
        "tests/unit/a/test_two.py": "from tests import (\n    shapes,\n    saved,\n)",
        "tests/unit/b/test_other.py": "from tests.tiny_words import x",
        "tests/dist/test_ranks.py": "import tests.tiny",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    one, two = "tests/unit/a/test_one.py", "tests/unit/a/test_two.py"
    assert selected(["tests/tiny.py"], tmp_path) == [one, two]
    assert selected(["tests/saved.py"], tmp_path) == [two]
    assert selected(["tests/unused.py"], tmp_path) == EVERYTHING


def test_tests_inside_a_selected_folder_are_named_once():
    paths = ["megatron_rl/loss/kl.py", "tests/unit/loss/test_kept.py"]
    assert selected(paths) == ["tests/unit/loss"]


def test_examples_select_the_tests_that_read_them():
    tests = selected(["examples/paper_tiny/cells.py"])
    for name in ("unit/test_paper_tiny.py", "unit/plan/test_recipes.py", "repo/test_scripts.py"):
        assert f"tests/{name}" in tests


def test_every_file_of_the_repository_selects_tests_that_exist():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tests = set().union(*(selected([path]) for path in listed.stdout.splitlines()))
    assert len(tests) > 50 and all((ROOT / test).exists() for test in tests)


def test_slow_tests_of_the_repository_run_when_they_change_or_everything_does():
    assert command([], "3")[-3:] == [REPO, *(f"--deselect={test}" for test in SLOW_REPO)]
    assert command(["tests/unit/loss"], "2")[7:9] == ["tests/unit/loss", REPO]
    assert f"--deselect={SLOW_REPO[0]}" not in command([SLOW_REPO[0]], "3")
    assert f"--deselect={SLOW_REPO[1]}" not in command(["tests/repo/test_scripts.py"], "3")
    assert not [word for word in command(EVERYTHING, "3") if word.startswith("--deselect")]
    for test in SLOW_REPO:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


@pytest.fixture
def repository(tmp_path):
    """Call git in a repository with one commit on main."""

    def git(*words):
        person = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *person, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept", "edited", "committed", "moved", "removed"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "-m", "first")
    return git


def test_changed_is_what_differs_from_the_merge_base_and_what_is_new(repository, tmp_path):
    repository("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("other")
    repository("mv", "moved", "place")
    repository("rm", "removed")
    repository("commit", "-am", "second")
    for name in ("edited", "new", "ignored"):
        (tmp_path / name).write_text("other")
    expected = {"committed", "moved", "place", "removed", "edited", "new"}
    assert changed_files(["main"], tmp_path) == expected
    assert changed_files(["origin/main", "main"], tmp_path) == expected, "the first that exists"
    repository("checkout", "-f", "main")
    (tmp_path / "kept").write_text("main moves on")
    repository("commit", "-am", "third")
    repository("checkout", "branch")
    assert "kept" not in changed_files(["main"], tmp_path), "the merge base, not the branch's end"


def test_without_a_merge_base_the_message_says_what_to_name(repository, tmp_path):
    with pytest.raises(ValueError, match=r"origin/main or trunk: .* make check BASE=BRANCH"):
        changed_files(["origin/main", "trunk"], tmp_path)
