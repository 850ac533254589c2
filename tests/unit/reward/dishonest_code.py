"""Code that does not solve `add(a, b)` and tries to pass the tests all the same."""

ANY = """
class Any{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
"""

WITHOUT_RESULTS = {
    "nothing": "",
    "a syntax error": "def add(a, b: return",
    "another name": "def plus(a, b): return a + b",
    "wrong": "def add(a, b): return a * b",
    "exit before the tests": "raise SystemExit(0)",
    "exit 0 at once": "import os\nos._exit(0)",
    "exit in the function": "def add(a, b): raise SystemExit(0)",
    "exit 0 in the function": "import os\ndef add(a, b): os._exit(0)",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): exit(0)",
    "a signal": "import os\ndef add(a, b): os.kill(os.getpid(), 9)",
    "ends loops": "def add(a, b): raise StopIteration",
    "ends generators": "def add(a, b): raise GeneratorExit",
    "keyboard": "def add(a, b): raise KeyboardInterrupt",
    "asserts": "def add(a, b): raise AssertionError",
    "warns": "def add(a, b): raise Warning('ok')",
    "no exception": "def add(a, b): raise NotImplementedError",
}
EQUAL_TO_ALL = {
    f"equal to all, {base or 'object'}": ANY.format(base=f"({base})" * bool(base))
    + f"\ndef add(a, b): return Any({argument})"
    for base, argument in {
        "": "",
        "int": "7",
        "float": "7.0",
        "str": "'7'",
        "list": "[7]",
        "dict": "{}",
        "tuple": "(7,)",
    }.items()
}
IN_ITS_PROCESS = {
    "patched equality": """
import builtins, operator
builtins.__dict__['AssertionError'] = type('Never', (Exception,), {})
operator.eq = lambda a, b: True
builtins.all = builtins.any = lambda values: True
def add(a, b): return 0
""",
    "patched names of tests": """
def check(candidate): pass
def assert_equal(a, b): pass
def add(a, b): return 0
class math:
    isclose = staticmethod(lambda *a, **k: True)
""",
    "expected values in frames and memory": """
import gc, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from map(repr, [*frame.f_locals.values(), *frame.f_globals.values()])
        yield repr(frame.f_code.co_consts)
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, tuple, list, dict)):
            yield repr(thing)[:10000]
def add(a, b):
    for text in texts():
        if found := re.search(r"assert add\\((\\d+), (-?\\d+)\\) == (-?\\d+)", text):
            if (found[1], found[2]) == (str(a), str(b)):
                return int(found[3])
    return 0
""",
    "expected values in files": """
import glob, os, re
def add(a, b):
    for root, _, names in os.walk("/"):
        if root.startswith("/python/"):  # public, and slow to read
            continue
        for name in names:
            try:
                with open(os.path.join(root, name), errors="ignore") as file:
                    text = file.read(100000)
            except (OSError, MemoryError):
                continue
            if found := re.search(r"assert add\\(%d, %d\\) == (-?\\d+)" % (a, b), text):
                return int(found[1])
    return 0
""",
    "messages of its own": """
import os, json
verdict = json.dumps({"compiled": None, "passed": [True] * 4, "why": [""] * 4}).encode()
for number in range(64):
    for text in (verdict, verdict + b"\\n", b'{"value": true}\\n'):
        try:
            os.write(number, text)
        except OSError:
            pass
def add(a, b): return 0
""",
    "messages of its own, later": """
import os, json
def add(a, b):
    verdict = json.dumps({"compiled": None, "passed": [True] * 4, "why": [""] * 4}).encode()
    for number in range(64):
        try:
            os.write(number, verdict)
        except OSError:
            pass
    os._exit(0)
""",
    "another server": """
import sys, __main__
names = sys._getframe(1).f_globals
names["encode"] = lambda value, keep: True
def add(a, b): return 0
""",
    "answers that are none": """
import sys
names = sys._getframe(1).f_globals
names["encode"] = lambda value, keep: ["dict", [[["list", []], 1]]]
def add(a, b): return 0
""",
    "an object that is none": """
import sys
names = sys._getframe(1).f_globals
names["encode"] = lambda value, keep: ["object", "__class__"]
def add(a, b): return 0
""",
    "deep answers": """
import sys
names = sys._getframe(1).f_globals
real = names["write_message"]
def write(file, message):
    file.write(b"[" * 100000 + b"]" * 100000 + b"\\n")
    file.flush()
names["write_message"] = write
def add(a, b): return 0
""",
    "a long answer": "def add(a, b): return 'x' * 2**23",
    "an object of operators": """
class Any:
    def __len__(self): return 7
    def __str__(self): return "5"
    def __iter__(self): return iter([True])
    def __getitem__(self, key): return self
    def __contains__(self, value): return True
def add(a, b): return Any()
""",
    "an endless answer": """
import sys
file = sys._getframe(2).f_locals["answers"]
def add(a, b):
    while True:
        file.write(b"x" * 65536)
""",
    "a huge number": "def add(a, b): return 10**10**5",
    "not a number": "def add(a, b): return float('nan')",
    "kills its neighbours": """
import os
def add(a, b):
    for target in (0, -1, 1, os.getppid()):
        try:
            os.kill(target, 9)
        except OSError:
            pass
""",
    "changes the arguments": """
def add(a, b):
    return a
""",
}
