"""tests/reruns.py: the tests that wait are run a second time when they fail, and more than two such
tests fail the session.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reruns import FILES, MOST

ROOT = Path(__file__).resolve().parents[2]
SECOND_TIME = """
import pytest
before = set()

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    assert number in before or before.add(number)
"""
WAITING, PURE = "tests/unit/rollout/test_client.py", "tests/unit/rollout/test_response_json.py"


def run(folder: Path, files: dict[str, int], *options: str) -> tuple[int, str]:
    """Status and output of a session in which so many tests of each file pass the second time
    only.
    """
    for name, count in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SECOND_TIME.format(count=count))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.reruns",
        "--rootdir",
        str(folder),
        *options,
        *files,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
@pytest.mark.parametrize("count", [MOST, MOST + 1])
def test_a_session_with_a_third_rerun_fails(tmp_path, count, options):
    status, output = run(tmp_path, {WAITING: count}, *options)
    assert f"{count} passed" in output and "failed" not in output.splitlines()[-1]
    line = next(line for line in output.splitlines()[-9:] if "run a second time" in line)
    assert line == f"tests run a second time: {count}" + (
        ": more than 2, so the session fails" if count > 2 else ""
    )
    assert status == (count > MOST)


def test_a_test_of_pure_logic_is_never_repeated(tmp_path):
    status, output = run(tmp_path, {PURE: 1, "tests/dist/test_loss.py": 1})
    assert status == 1 and "2 failed" in output and "tests run a second time: 0" in output


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_whose_tests_are_repeated_starts_a_process_or_a_server(name):
    starts = (
        r"import subprocess|FakeServer|fake_server|stub_server|HTTPServer|RewardPool|serve\(|socket"
    )
    assert re.search(starts, (ROOT / name).read_text()), f"remove {name} from tests/reruns.py"
