"""Several nodes on one machine: a network namespace each, joined by a bridge, with a host name of its own.

Where that is not permitted, distinct loopback addresses; the machine's one host name is every node's then.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Node:
    """One node.  prefix: the command that runs another one there."""

    rank: int
    address: str
    interface: str
    host: str
    prefix: list[str]
    process: subprocess.Popen | None = None
    log: Path = Path()
    lives: int = field(default=0)

    def train(self, work: Path, master: str, port: int, *arguments: str, **variables: str) -> None:
        """train.sh as a user starts it."""
        place = {
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "LOCAL_ADDR": self.address,
            "NODE_RANK": str(self.rank),
        }
        self.start("train.sh", work, *arguments, PYTHON=sys.executable, **place, **variables)

    def start(self, script: str, work: Path, *arguments: str, **variables: str) -> None:
        """A script of examples/launch, its output in `log`."""
        self.log = work / f"{self.host}_{self.rank}.{self.lives}.log"
        self.lives += 1
        own = {"GLOO_SOCKET_IFNAME": self.interface, "LOG_DIR": str(work / "logs"), "OMP_NUM_THREADS": "1"}
        env = os.environ | own | variables
        command = [*self.prefix, "bash", str(ROOT / "examples/launch" / script), *arguments]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout: float) -> int:
        """Exit status; the output is in the error where it takes longer."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host} still runs after {timeout:.0f} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def cut_off(self) -> None:
        """Its cable is pulled: nothing arrives any more, and nobody is told."""
        assert self.prefix
        run(*self.prefix, "ip", "link", "set", self.interface, "down")

    def kill(self) -> None:
        """Everything that runs there, at once, as a node that goes down: nobody gets to say goodbye."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def make_nodes(count: int) -> Iterator[list[Node]]:
    """Nodes with addresses in ascending order; what still runs on them at the end is killed."""
    names = [f"mrl{os.getpid()}n{rank}" for rank in range(count)]
    with contextlib.ExitStack() as stack:
        try:
            nodes = [in_namespace(rank, name, names[0], stack) for rank, name in enumerate(names)]
        except (OSError, subprocess.CalledProcessError):
            nodes = [Node(rank, f"127.0.0.{rank + 2}", "lo", f"loopback{rank}", []) for rank in range(count)]
        try:
            yield nodes
        finally:
            for node in nodes:
                if node.process is not None:
                    node.kill()


def in_namespace(rank: int, name: str, first: str, stack: contextlib.ExitStack) -> Node:
    """A namespace joined to the bridge, which lives in the first node's."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0:
        raise OSError("no namespaces here")
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "del", name)
    here, there = ["ip", "-n", name], ["ip", "-n", first]
    address = f"10.213.7.{rank + 1}"
    run(*here, "link", "set", "lo", "up")
    if rank == 0:
        run(*here, "link", "add", "cluster", "type", "bridge")
        interface = "cluster"
    else:
        run(*here, "link", "add", "eth", "type", "veth", "peer", "name", f"port{rank}", "netns", first)
        run(*there, "link", "set", f"port{rank}", "master", "cluster", "up")
        interface = "eth"
    run(*here, "addr", "add", f"{address}/24", "dev", interface)
    run(*here, "link", "set", interface, "up")
    host = f"node{rank}"
    rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    run("ip", "netns", "exec", name, *rename, "true")
    return Node(rank, address, interface, host, ["ip", "netns", "exec", name, *rename])


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def wait_until(condition, seconds: float, nodes: list[Node]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(node.text() for node in nodes)
        assert time.monotonic() < deadline, f"nothing after {seconds:.0f} s:\n{logs}"
        assert any(node.process is not None and node.process.poll() is None for node in nodes), logs
        time.sleep(0.02)
