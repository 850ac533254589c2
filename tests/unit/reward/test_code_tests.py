"""The reward function of the recipe `code`: right code scores 1, and nothing else does."""

import ast
import json
import os
import subprocess
import sys
import time

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.reward import Episode, LabelError
from megatron_rl.reward import code_tests as functions
from megatron_rl.reward.code_tests import CodeTests, code_of
from megatron_rl.reward.function import load_reward
from megatron_rl.reward.pool import RewardPool
from megatron_rl.reward.sandbox import box as module
from megatron_rl.reward.sandbox.box import Box, Limits, SandboxError, find_box
from tests.unit.reward import dishonest_code as dishonest

ADD = "def add(a, b):\n    return a + b"
TESTS = [
    "assert add(2, 3) == 5",
    "assert add(10, -4) == 6",
    "assert all(map(lambda pair: add(*pair) == sum(pair), [(1, 2), (3, 4)]))",
    "import math\nassert math.isclose(add(0.1, 0.2), 0.3)",
]


@pytest.fixture(scope="module")
def code_tests():
    try:
        return CodeTests(Limits(seconds=20.0))
    except SandboxError as error:
        pytest.skip(str(error))


def test_code_that_solves_the_problem_passes(code_tests):
    verdict = code_tests.judge(ADD, TESTS)
    assert verdict.is_right and verdict.why == ("",) * 4 and verdict.compiled


ALL = dishonest.WITHOUT_RESULTS | dishonest.EQUAL_TO_ALL | dishonest.IN_ITS_PROCESS


@pytest.mark.parametrize("name", ALL)
def test_dishonest_code_passes_no_test(code_tests, name):
    started = time.monotonic()
    verdict = code_tests.judge(ALL[name], TESTS)
    # "another server" answers True, which is the result of no test
    assert verdict.passed == (False,) * 4, verdict
    assert time.monotonic() - started < 15 and not verdict.is_late


SOLUTIONS = {
    "a list in place": (
        "def order(values): values.sort()",
        ["values = [3, 1, 2]\norder(values)\nassert values == [1, 2, 3]"],
    ),
    "a dict in place": ("def put(d): d['a'] = {1}", ["d = {}\nput(d)\nassert d == {'a': {1}}"]),
    "sets, tuples, bytes and text": (
        "def f(x): return x",
        [
            "assert f({1, (2, 'é\\udc00')}) == {1, (2, 'é\\udc00')}",
            "assert f(b'\\x00\\xff') == b'\\x00\\xff' and f(frozenset({1})) == frozenset({1})",
            "assert f([None, True, 1.5, 2j]) == [None, True, 1.5, 2j] and f(None) is None",
            "assert isinstance(f(True), bool) and f(-0.0).hex() == '-0x0.0p+0'",
            "assert f(2**70) == 2**70 and f(float('inf')) > 10**400",
        ],
    ),
    "subclasses of plain types": (
        "import collections, enum\n"
        "def count(text): return collections.Counter(text)\n"
        "Point = collections.namedtuple('Point', 'x y')\n"
        "def point(): return Point(1, 2)\n"
        "class Colour(enum.IntEnum):\n    RED = 3\n"
        "def red(): return Colour.RED",
        [
            "assert count('aab') == {'a': 2, 'b': 1}",
            "assert point() == (1, 2)",
            "assert red() == 3",
        ],
    ),
    "a class, and its objects as arguments": (
        "class Pair:\n"
        "    def __init__(self, a, b): self.a, self.b = a, b\n"
        "    def total(self): return self.a + self.b\n"
        "def longest(pairs): return max(pairs, key=Pair.total)",
        [
            "assert Pair(1, b=2).total() == 3 and Pair(1, 2).a == 1",
            "assert longest([Pair(1, 2), Pair(3, 4)]).total() == 7",
            "first = Pair(1, 2)\nassert longest([first]) is not None",
        ],
    ),
    "exceptions": (
        "class Mine(ValueError): pass\n"
        "def f(x):\n    if x < 0: raise Mine('negative')\n    return x",
        [
            "try:\n    f(-1)\n    ok = False\nexcept ValueError as error:\n"
            "    ok = str(error) == 'negative'\nassert ok"
        ],
    ),
    "as in HumanEval": (
        "def add(a, b): return a + b",
        ["def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"],
    ),
    "a value": ("LIMIT = 7\ndef f(): return LIMIT", ["assert LIMIT == f() == 7"]),
    "dataclasses, whose annotations are values": (
        "from dataclasses import KW_ONLY, InitVar, dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass A:\n    x: InitVar[int]\n    _: KW_ONLY\n    step: int = 1\n"
        "    cache: ClassVar[dict] = {}\n"
        "    def __post_init__(self, x): self.y = x + self.step\n"
        "def f(x): return A(x, step=2).y",
        ["assert f(1) == 3", "def g(x: int): pass\nassert g.__annotations__ == {'x': int}"],
    ),
    "pickles of its classes": (
        "import pickle\nclass P:\n    def __init__(self, x): self.x = x\n"
        "def f(x): return pickle.loads(pickle.dumps(P(x))).x",
        ["assert f(1) == 1"],
    ),
    "ranges, views, deques and iterators": (
        "from collections import deque\nfrom itertools import count, islice\n"
        "def squares(n):\n    for i in range(n): yield i * i\n"
        "def texts(values): return map(str, values)\n"
        "def first(n): return islice(count(), n)\n"
        "def numbers(n): return range(n)\n"
        "def views(d): return d.keys(), d.values(), d.items()\n"
        "def queue_of(*values): return deque(values)",
        [
            "assert list(squares(3)) == [0, 1, 4] and next(squares(3)) == 0",
            "assert list(texts(range(2))) == list(texts(iter((0, 1)))) == ['0', '1']",
            "assert sum(first(10000)) == 49995000 and next(first(0), None) is None",
            "assert numbers(3) == range(3) and numbers(10**12)[-1] == 10**12 - 1",
            "keys, values, items = views({1: [2]})\n"
            "assert keys == {1} and list(values) == [[2]] and list(items) == [(1, [2])]",
            "import collections\nassert queue_of(1, 2) == collections.deque([1, 2])",
        ],
    ),
    "len, str, items and iteration of objects": (
        "class Shelf:\n"
        "    def __init__(self, *books): self.books = books\n"
        "    def __len__(self): return len(self.books)\n"
        "    def __str__(self): return ' '.join(self.books)\n"
        "    def __iter__(self): return iter(self.books)\n"
        "    def __getitem__(self, index): return self.books[index]",
        [
            "shelf = Shelf('a', 'b')\nassert len(shelf) == 2 and str(shelf) == 'a b' and shelf",
            "shelf = Shelf('a', 'b')\nassert list(shelf) == ['a', 'b'] and shelf[-1] == 'b'",
            "assert 'b' in Shelf('b') and 'a' not in Shelf('b')",
        ],
    ),
    "a main part that exits": (
        "import sys\ndef f(): return 1\ndef main(): return 0\n"
        "if __name__ == '__main__':\n    sys.exit(main())",
        ["assert f() == 1"],
    ),
    "a main part that reads its input": (
        "def f(): return 1\nif __name__ == '__main__':\n    print(int(input()))",
        ["assert f() == 1"],
    ),
    "a built-in name": (
        "def sum(a, b): return a - b",
        ["assert sum(10, 15) == -5", "assert abs(sum(1, 1)) == 0"],
    ),
    "a built-in name, as in HumanEval": (
        "def pow(a, b): return abs(a - b)",
        ["def check(candidate):\n    assert abs(candidate(1, 3) - 2) < 1e-6\ncheck(pow)"],
    ),
    "a built-in name within another": (
        "def sum(a, b): return a - b",
        ["assert abs(sum(10, 15) + 5) < 1e-6", "assert isinstance(sum(1, 1), int)"],
    ),
    "a built-in name that others make arguments for": (
        "def sorted(values): return 7",
        ["assert sorted(range(3)) == 7", "assert sorted(list([2])) == 7"],
    ),
    "a name of a module": (
        "class Queue:\n"
        "    def __init__(self): self.entries = []\n"
        "    def put(self, entry): self.entries.append(entry)\n"
        "    def size(self): return len(self.entries)\n"
        "queue = Queue()\nwinreg = queue",
        [
            "queue.put(1)\nassert queue.size() == 1",
            "import math\nassert math.isclose(queue.size(), 1)",
            "assert winreg.size() == 1",
        ],
    ),
    "built-in names around the code": (
        "def f(x): return x",
        ["assert sorted(f([2, 1])) == [1, 2]", "assert len([1]) == 1"],
    ),
    "output and a main part": (
        "import sys\ndef f(): print('x' * 10**6); return 1\n"
        "if __name__ == '__main__':\n    print(f())",
        ["assert f() == 1"],
    ),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_what_tests_may_do(code_tests, name):
    code, tests = SOLUTIONS[name]
    verdict = code_tests.judge(code, tests)
    assert verdict.is_right, verdict


def test_an_annotation_without_its_import_is_an_error_as_in_python(code_tests):
    verdict = code_tests.judge("def f(x: List[int]): return sum(x)", ["assert f([1]) == 1"])
    assert not verdict.compiled and "'List' is not defined" in verdict.why[0]


def test_an_iterator_without_end_is_an_error(code_tests):
    code = "from itertools import count\ndef f(): return count()"
    verdict = code_tests.judge(code, ["assert next(f()) == 0"])
    assert not verdict.is_right and "more than 10000 values" in verdict.why[0]


@pytest.mark.parametrize("code", ["I do not know", "x = 1", "def pow(a, b): return 9"])
def test_a_tested_builtin_name_is_not_that_of_python(code_tests, code):
    tests = ["assert pow(2, 5) == 32", "import math\nassert math.isclose(pow(2, 2), 4)"]
    assert code_tests.judge(code, tests, "limit = int(3)").passed == (False, False)


def test_the_code_replaces_no_builtin_name_around_a_tested_one(code_tests):
    """Neither around a name of the code, nor around the built-in name that is tested."""
    code = "def all(values): return True\ndef abs(x): return 0\ndef f(x): return x\n"
    tests = ["assert all([f(1) == 2])", "assert abs(f(3)) == 0"]
    assert code_tests.judge(code, tests).passed == (False, False)
    tests = ["assert pow(2, 3) == 8", "assert abs(pow(2, 3) - 8) < 1"]
    assert code_tests.judge(code + "def pow(a, b): return 1", tests).passed == (False, False)


def test_setup_is_before_every_test_and_tests_are_independent(code_tests):
    setup = "import collections\ncases = [(1, 2)]"
    tests = [
        "cases.append((5, 5))\nassert [add(*case) for case in cases] == [3, 10]",
        "assert [add(*case) for case in cases] == [3]",
        "assert isinstance(collections.OrderedDict(), dict)",
        "assert add(1, 1) == 3",
    ]
    verdict = code_tests.judge(ADD, tests, setup)
    assert verdict.passed == (True, True, True, False) and verdict.why[3].startswith("wrong")


def test_a_test_that_catches_everything_does_not_pass_by_the_end_of_the_code(code_tests):
    code = "import os\ndef f(x): os._exit(0)"
    tests = ["try:\n    f(1)\n    ok = False\nexcept BaseException:\n    ok = True\nassert ok"]
    assert code_tests.judge(code, tests).passed == (False,)


def test_a_module_of_the_tests_is_not_that_of_the_code(code_tests):
    code = "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0"
    verdict = code_tests.judge(code, ["assert math.isclose(f(1), 5)"])
    assert verdict.passed == (False,) and verdict.why[0].startswith("wrong")


def test_long_reasons_of_many_tests_arrive(code_tests):
    """Half of 120 tests pass; the others have reasons that JSON writes in 2,400 bytes each."""
    code = "def f(x):\n    if x % 2: raise ValueError('\\U0001f600' * 300)\n    return x"
    verdict = code_tests.judge(code, [f"assert f({number}) == {number}" for number in range(120)])
    assert verdict.passed == (True, False) * 60 and not verdict.is_right
    assert verdict.why[1].startswith("ValueError: \U0001f600")


@pytest.mark.parametrize("code", ["while True: pass", "def add(a, b):\n    while True: pass"])
def test_code_that_does_not_end_is_stopped(code):
    try:
        limited = CodeTests(Limits(seconds=1.5))
    except SandboxError as error:
        pytest.skip(str(error))
    started = time.monotonic()
    score = limited(Episode("", code, "", metadata={"tests": TESTS}))
    assert score.value == 0 and score.metrics["timed_out"] == 1
    assert time.monotonic() - started < 6


def test_a_late_test_leaves_the_results_of_those_before():
    try:
        limited = CodeTests(Limits(seconds=4))
    except SandboxError as error:
        pytest.skip(str(error))
    code = "def f(x):\n    while x == 2: pass\n    return x"
    verdict = limited.judge(code, ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"])
    assert verdict.passed == (True, False, False) and verdict.is_late and not verdict.is_right
    assert verdict.why == ("", "late", "late")


def test_a_number_of_more_digits_than_python_writes_fails_its_test_alone(code_tests):
    code = "def f(x): return 10**6000"
    verdict = code_tests.judge(code, ["assert f(1) > 1", "assert f(1) == 2, f(1)", "assert True"])
    assert verdict.passed == (True, False, True) and verdict.why[1].startswith("wrong: ")


@pytest.mark.parametrize("num_started", [0, 1])
def test_a_program_that_does_not_start_leaves_no_pipe_open(num_started):
    class FullMachine(Box):
        def start(self, program, **options):
            if "candidate" in program[-1] and num_started:
                return subprocess.Popen(["cat"], stdin=options["stdin"], stdout=options["stdout"])
            raise BlockingIOError("no process")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        CodeTests(box=FullMachine("unshare")).judge(ADD, TESTS)
    assert os.listdir("/proc/self/fd") == before


CODE = "def f(a):\n    return a\n"
INDENTED = "1. So:\n   ```python\n   def f(a):\n       return a\n   ```"
RESPONSES = [
    f"text\n```python\na = 1\n```\nor\n```python\n{CODE}```\nend",
    f"text\n```\na = 1\n```\nor\n```\n{CODE}```\nend",
    f"It prints\n```\n3\n```\nwith\n```python\n{CODE}```\nas in\n```\n4\n```",
    f"```Python\n{CODE}"[:-1],  # cut at the limit of tokens
    CODE,
    f"```python3\n{CODE}```\nThis returns a.",
    f"``` python\n{CODE}```",
    f"```py title='a.py'\n{CODE}```",
    f"```python\n{CODE}```".replace("\n", "\r\n"),
    f"~~~python\n{CODE}~~~",
    f"````python\n{CODE}````",
    f"Install:\n```bash\npip install x\n```\nThen:\n```python\n{CODE}```\n",
    f"```text\nf(2) -> 2\n```\n\n```\n{CODE}```\nDone.",
    f"```python\n{CODE}```\nIts output:\n```json\n2\n```",
    f"I use ``` fences.\n```python\n{CODE}```",
    INDENTED,
]


@pytest.mark.parametrize("response", RESPONSES)
def test_code_is_the_last_block_of_python_of_a_response(response):
    assert code_of(response) == CODE


def test_a_fence_of_another_kind_or_shorter_is_part_of_the_block():
    text = "x = 1\n```\n~~~~\n"
    assert code_of(f"````\n{text}````") == code_of(f"`````py\n{text}")[:-1] == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "column 'tests' = None: must be a list of texts with at least one test"),
        ({"tests": []}, "must be a list of texts"),
        ({"tests": ["x", 1]}, "must be a list of texts"),
        ({"tests": "assert f()"}, "must be a list of texts"),
        ({"tests": ["assert f("]}, "test 'assert f.' is not Python"),
        ({"tests": ["assert f()"], "setup": 1}, "column 'setup' = 1: must be text"),
    ],
)
def test_rows_without_usable_tests_are_errors_of_the_data(metadata, message):
    with pytest.raises(LabelError, match=message):
        functions.tests_of(Episode("", "", "", metadata=metadata))


def test_the_function_is_loaded_by_its_name_and_scores_in_the_pool():
    try:
        find_box()
    except SandboxError as error:
        pytest.skip(str(error))
    assert load_reward("megatron_rl.reward.code_tests:score", "", 15).form == "episode"
    with RewardPool(
        RewardConfig(
            function="megatron_rl.reward.code_tests:score", timeout_seconds=30, on_error="drop"
        )
    ) as pool:
        episodes = [
            Episode("p", f"```python\n{code}\n```", "add", metadata={"tests": tests})
            for code, tests in [
                (ADD, TESTS),
                ("def add(a, b): return 5", TESTS),
                ("import os; os._exit(0)", TESTS),
                (ADD, []),
            ]
        ]
        (rewarded,) = pool.score_episodes([episodes])
    assert [each.reward for each in rewarded[:3]] == [1, 0, 0]
    assert rewarded[1].metrics == {"tests_passed_frac": 0.25, "compiled": 1, "timed_out": 0}
    assert rewarded[2].metrics["compiled"] == 0
    assert pool.counters["bad_labels"] == 1, "a row without tests is counted, and never scores"


def test_a_program_of_the_box_imports_the_standard_library_alone():
    """Nothing else is installed there."""
    known = sys.stdlib_module_names | {module.PACKAGE}
    for path in module.PROGRAMS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                parents = {name.rsplit(".", count)[0] for count in range(name.count(".") + 1)}
                assert parents & known, f"{path}: {name}"


def test_long_code_is_not_run(code_tests):
    assert not code_tests.judge("#" * 200_000, TESTS).compiled
    verdict = code_tests.judge("text = " + json.dumps("x" * 90_000) + "\n" + ADD, TESTS)
    assert verdict.is_right


def test_what_a_test_prints_is_no_result(code_tests):
    """The code decides what is printed here: it could write the results of all tests."""
    tests = ["print(f(1))\nassert f(1) == 2", "assert f(2) == 3"]
    forged = 'def f(x): return \'""\\n""\''
    verdict = code_tests.judge(forged, tests)
    assert verdict.passed == (False, False) and not verdict.is_right
    assert code_tests.judge("def f(x): return x + 1", tests).passed == (True, True)
