"""The shell and the editor of an episode: what the model reads, and what is left of them."""

import asyncio
import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.reward.sandbox.box import SandboxError, find_box
from megatron_rl.reward.sandbox.programs import workspace as program
from megatron_rl.reward.sandbox.workspace import COMMANDS, LIMITS, Workspace, WorkspaceError
from megatron_rl.rollout.agents.reply import ToolCall
from megatron_rl.rollout.agents.tools import Tools
from tests.fake_server import wait_for
from tests.unit.reward.test_sandbox import processes_with, skip_without


@pytest.fixture(params=["bubblewrap", "unshare"])
def box(request):
    skip_without(request.param)
    return find_box(LIMITS, request.param, COMMANDS)


@pytest.fixture
def workspace(box):
    with Workspace({"a/main.py": "print(1)\n"}, box=box) as workspace:
        yield workspace


def short(box, seconds=1.0):
    return Workspace(box=box, seconds=seconds, output_bytes=1000)


def assert_gone(marker):
    assert wait_for(lambda: not processes_with(marker), 5), processes_with(marker)


def test_a_shell_keeps_its_files_from_one_command_to_the_next(workspace):
    assert workspace.shell("python3 a/main.py; pwd; echo x > b; ls") == "1\n/box\na\nb\n"
    assert workspace.shell("cat b; cd a; ls; true") == "x\nmain.py\n"
    assert workspace.shell("cat none; exit 3") == (
        "cat: none: No such file or directory\n[exit status 3]"
    )
    assert workspace.shell("kill -9 $$") == "[exit status -9]"
    assert workspace.shell("printf x; false") == "x\n[exit status 1]"
    # neither files nor the network of this machine, nor root
    assert workspace.shell("ls /proc /home /etc/passwd; id -u").count("No such file") == 3
    connect = "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
    assert "Error" in workspace.shell(f'python3 -c "{connect}"')
    assert int(workspace.run("id -u").output) > 0


def test_an_editor_shows_creates_and_replaces(workspace):
    assert workspace.create("b/c.txt", "one\ntwo\nthree") == "wrote b/c.txt"
    assert workspace.view("b/c.txt") == "1\tone\n2\ttwo\n3\tthree"
    assert workspace.view("/box/b/c.txt", 2, 2) == "2\ttwo"
    assert workspace.view("b/c.txt", 4) == "error: b/c.txt has the lines 1 to 3"
    assert workspace.replace("b/c.txt", "two", "2") == "wrote b/c.txt"
    assert workspace.read("b/c.txt") == "one\n2\nthree" and workspace.view("a/main.py", 1, 9)
    wrong = "error: b/c.txt has the old text {} times, and must have it once"
    assert workspace.replace("b/c.txt", "e", "E") == wrong.format(3)
    assert workspace.replace("b/c.txt", "", "E") == wrong.format(0)
    assert workspace.view("b") == "error: /box/b is a directory"
    assert workspace.view("d") == "error: no such file or directory"
    assert workspace.create("b", "x") == "error: /box/b is a directory"
    assert workspace.create("a\0b", "x") == "error: embedded null byte"
    workspace.shell("mkfifo p 2>&1 || python3 -c 'import os; os.mkfifo(\"p\")'")
    assert workspace.view("p") == workspace.create("p", "x") == "error: /box/p is no file"
    # text of every kind arrives as it was
    text = "\r\n\té\u2028\ud83d".encode(errors="surrogatepass").decode(errors="replace")
    workspace.create("e", text)
    assert workspace.read("e") == text and workspace.create("empty", "") == "wrote empty"
    assert workspace.view("empty") == ""


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "."])
def test_first_files_are_within_the_directory(path):
    with pytest.raises(ValueError, match="must be one within the directory"):
        Workspace({path: "x"})


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({f"src/{number}": "x" for number in range(1200)}, "no space left on device"),
        ({"a": "x" * (17 << 20), "b": "y"}, "no space left on device|file too large"),
        ({"a": "1", "a/b": "2", "c": "3"}, "not a directory|file exists"),
    ],
)
def test_first_files_that_cannot_be_written_are_an_error_of_the_environment(box, files, why):
    """The model reads nothing of it, and no command sees a part of the files."""
    if len(files) > 1000 and box.mechanism == "bubblewrap":
        pytest.skip("its directory has no limit of files")
    with Workspace(files, box=box) as workspace:
        with pytest.raises(ValueError, match=f"files of a workspace: ({why})"):
            workspace.shell("ls")
        assert workspace.shell("ls").startswith("error: its first files could not be written")


def test_a_workspace_that_does_not_start_is_no_answer_to_the_model(box, monkeypatch):
    monkeypatch.setattr("megatron_rl.reward.sandbox.workspace.START_SECONDS", 0.0)
    with Workspace({"a": "x"}, box=box) as workspace:
        with pytest.raises(SandboxError, match="a workspace did not start: .*no answer in time"):
            workspace.shell("true")


def test_a_command_cannot_answer_in_the_place_of_the_program(workspace):
    """Nor read its memory: it holds the pipe to the trainer."""
    forge = """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in {1, os.getppid()}:
    print(libc.ptrace(16, pid, 0, 0), libc.syscall(438, os.pidfd_open(pid), 1, 0))
"""
    workspace.create("forge.py", forge)
    # the kernel shows the memory of a process that others may not read as that of root
    front = psutil.Process(workspace._process.pid)
    programs = [
        process
        for process in front.children(recursive=True)
        if "programs.workspace" in " ".join(process.cmdline())
    ]
    assert programs
    for process in programs:
        assert os.stat(f"/proc/{process.pid}/mem").st_uid != process.uids().effective
    lines = set(workspace.shell("python3 forge.py; true").splitlines())
    assert lines == {"-1 -1"}
    assert workspace.shell("echo on") == "on\n"


def test_an_edit_that_fails_leaves_the_file(workspace):
    workspace.shell("printf old > f; chmod 755 f; head -c 15000000 /dev/zero > big; cp f g")
    for name in ("f", "new"):
        assert workspace.create(name, "x" * 2**21) == "error: no space left on device"
    assert workspace.read("f") == "old" and workspace.shell("ls") == "a\nbig\nf\ng\n"
    assert workspace.create("f", "\ud83d") != "wrote f" and workspace.read("f") == "old"
    # an edit keeps who may run the file
    assert workspace.shell("rm big; stat -c %a f") == "755\n"
    assert workspace.create("f", "new") == "wrote f" and "755" in workspace.shell("stat -c %a f")


def test_output_without_a_gap_is_text_without_a_gap(box):
    with short(box) as workspace:
        command = "python3 -c \"print('a' + 'é' * 400, end='')\""
        assert workspace.shell(command) == "a" + "é" * 400


def test_the_end_of_a_shell_is_noticed_while_another_process_writes_without_pause(monkeypatch):
    """Both are ready at once: what the shell wrote itself fits in one more read."""

    class AllReady(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def register(self, file, _):
            self.append((SimpleNamespace(fileobj=file), 0))

        def select(self, _):
            return self

    monkeypatch.setattr(program.selectors, "DefaultSelector", AllReady)
    output = program.Output(1000)
    with open("/dev/zero", "rb", buffering=0) as endless:
        shell = SimpleNamespace(stdout=endless, pid=os.getpid())
        assert output.read(shell, time.monotonic() + 60)
    assert output.count == 65_536


def test_what_runs_on_in_the_background_does_not_hold_up_a_command(box):
    with short(box, seconds=20.0) as workspace:
        started = time.monotonic()
        ended = workspace.run("yes & echo on")
        assert not ended.is_late and not ended.is_too_long
        assert time.monotonic() - started < 15


def test_bytes_that_are_no_text_survive_an_edit(workspace):
    workspace.shell(r"printf 'a\377b' > f")
    assert workspace.view("f") == "1\ta\ufffdb"
    assert workspace.replace("f", "a", "c") == "wrote f"
    assert workspace.shell("od -An -tx1 f") == " 63 ff 62\n"


@pytest.mark.parametrize("path", ["/etc/hostname", "../etc/hostname", "link/hostname", "/box", ""])
def test_the_editor_refuses_paths_outside_the_directory(workspace, path):
    workspace.shell("ln -s /etc link")
    for answer in (
        workspace.view(path),
        workspace.create(path, "x"),
        workspace.replace(path, "a", "b"),
    ):
        assert answer == f"error: {path} is not in the directory /box"
    with pytest.raises(WorkspaceError, match="is not in the directory"):
        workspace.read(path)


def test_a_link_out_of_the_directory_reaches_nothing_of_this_machine(workspace, tmp_path):
    (tmp_path / "secret").write_text("secret")
    os.chmod(tmp_path, 0o777)
    workspace.shell(f"ln -s {tmp_path} link; echo x > link/new; cat link/secret")
    assert "secret" not in workspace.shell("cat link/secret").replace("link/secret", "")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_long_output_is_cut_with_its_count(box):
    with short(box) as workspace:
        shown = workspace.shell("printf begin; head -c 99990 /dev/zero | tr '\\0' x; printf end")
        assert shown.startswith("begin" + "x" * 495 + "\n[98998 bytes left out]\nx")
        assert shown.endswith("xend") and len(shown) < 1100
        assert workspace.shell("head -c 1000 /dev/zero | tr '\\0' x") == "x" * 1000
        started = time.monotonic()
        assert workspace.shell("yes").endswith("\n[stopped, as it wrote too much]")
        assert workspace.run("yes").is_too_long and time.monotonic() - started < 10
        workspace.shell("yes | head -c 2000 > f")
        assert workspace.view("f").endswith(" characters left out]")
        workspace.shell("head -c 2000000 /dev/zero > g")
        assert workspace.view("g") == "error: /box/g has 2000000 bytes, and 1048576 can be read"


def test_a_command_without_an_end_is_stopped(box):
    with short(box) as workspace:
        assert workspace.shell("echo x; sleep 60") == "x\n[stopped after 1 s]"
        assert workspace.shell("exec >/dev/null 2>&1; sleep 60") == "[stopped after 1 s]"
        assert workspace.shell("trap '' TERM INT; while true; do :; done") == "[stopped after 1 s]"
        assert workspace.shell("echo on") == "on\n"


def test_a_fork_bomb_meets_the_limit_of_processes_and_ends(box):
    marker = secrets.token_hex(8)
    bomb = (
        f"import os, time\ntry:\n while True: os.fork()\nexcept OSError: time.sleep(60) # {marker}"
    )
    with short(box, 5.0) as workspace:
        workspace.create("bomb.py", bomb)
        counted = "import os\nn = 0\ntry:\n while os.fork(): n += 1\nexcept OSError: print(n)"
        workspace.create("count.py", counted + "\nelse: import time; time.sleep(9)")
        assert 0 < int(workspace.shell("python3 count.py").split()[0]) < LIMITS.processes
        assert workspace.shell(f"python3 bomb.py {marker}") == "[stopped after 5 s]"
        assert_gone(marker)
        assert workspace.shell("echo on") == "on\n"  # and none of them counts any more


def test_what_a_command_leaves_in_the_background_ends_with_it(box):
    marker = secrets.token_hex(8)
    with short(box, 9.0) as workspace:
        started = time.monotonic()
        assert workspace.shell(f"(sleep 60; : {marker}) & echo left") == "left\n"
        code = f"import os, time; os.fork() or os.setsid() or time.sleep(60) # {marker}"
        workspace.shell(f'python3 -c "{code}"; true')
        assert time.monotonic() - started < 8
        assert_gone(marker)


def test_memory_and_files_are_limited(workspace):
    assert "MemoryError" in workspace.shell("python3 -c 'x = bytearray(2**30)'")
    assert "No space left" in workspace.shell(
        "for i in 1 2 3; do head -c 9000000 /dev/zero > f$i; done"
    )
    assert workspace.create("g", "x" * 2**20) == "error: no space left on device"
    assert workspace.shell("rm f*; echo on") == "on\n"


def test_a_command_that_cannot_be_started_is_told(workspace):
    assert workspace.shell("echo " + "x" * 200_000) == "error: argument list too long"
    assert workspace.shell("a\0b") == "error: embedded null byte"


def test_a_command_that_ends_the_workspace_is_told(workspace):
    """Process 1 is safe from it; a front process of bubblewrap is not."""
    first = workspace.shell("kill -9 $PPID; kill -9 -1; echo on")
    if "ended" in first:
        assert workspace.shell("echo on") == first
    workspace._process.kill()  # as a machine without memory does
    workspace._process.wait()  # its last act is the end of those inside
    lost = workspace.shell("echo on")
    assert lost.startswith("error: the workspace has ended: ") and workspace.view("b") == lost


def test_answers_that_a_command_has_forged_are_no_danger(box, monkeypatch):
    forged = {"head": 5, "tail": "", "left_out": 0, "status": 0, "is_late": 0, "is_too_long": 0}
    for answer in ("1", "{}", '{"status": 0', "[" * 10_000, "x" * 100, json.dumps(forged)):
        with Workspace(box=box) as workspace:
            workspace.shell("true")
            monkeypatch.setattr(
                "megatron_rl.reward.sandbox.workspace.exchange_line",
                lambda *_, text=answer: text.encode(),
            )
            assert workspace.shell("true").startswith("error: the workspace has ended: ")
        monkeypatch.undo()


def test_nothing_stays_of_a_workspace(box):
    marker = secrets.token_hex(8)
    gc.collect()  # what tests before this one have left
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    with Workspace(box=box) as workspace:
        running = threading.Thread(target=workspace.shell, args=(f"sleep 60; : {marker}",))
        running.start()
        assert wait_for(lambda: processes_with(marker), 20)
    running.join(5)
    assert not running.is_alive()
    assert_gone(marker)
    assert workspace.shell("true") == "error: the workspace is closed"
    workspace.close()
    unused = Workspace(box=box)
    unused.close()  # it had not started
    forgotten = Workspace(box=box)
    assert forgotten.shell("echo on") == "on\n"
    pid = forgotten._process.pid
    del forgotten
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")
    after = set(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] == before[0] and after[1] <= before[1] + 1  # the thread that starts programs


def test_a_workspace_outlives_the_thread_of_its_first_call(box):
    with Workspace(box=box) as workspace:
        thread = threading.Thread(target=workspace.shell, args=("echo x > f",))
        thread.start()
        thread.join()
        time.sleep(0.2)
        assert workspace.shell("cat f") == "x\n"


def test_the_model_calls_the_tools_by_their_schemas(workspace):
    tools = Tools(workspace.tools)
    assert tools.names == ["shell", "view", "create", "replace"]
    view = tools.schemas[1]["function"]["parameters"]
    assert view["required"] == ["path"] and view["properties"]["first"]["type"] == "integer"

    def call(name, **arguments):
        text = "{}"
        return asyncio.run(tools.answer(ToolCall("id", name, arguments, text)))

    assert call("shell", command="cat a/main.py") == ("print(1)\n", False)
    assert call("replace", path="a/main.py", old="1", new="2") == ("wrote a/main.py", False)
    assert call("view", path="a/main.py") == ("1\tprint(2)", False)
    assert call("view", path="/etc/x") == ("error: /etc/x is not in the directory /box", False)
    assert call("view", path=1)[1]


def test_the_program_refuses_to_run_without_walls():
    done = subprocess.run([sys.executable, program.__file__], capture_output=True, text=True)
    assert done.returncode == 1 and "within walls alone" in done.stderr
