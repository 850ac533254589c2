"""Several nodes on one machine: one network namespace each, joined by a bridge, each with its own
host name.

Where that is not permitted, distinct loopback addresses; all nodes then have the machine's host
name.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Node:
    """One node.  prefix: of a command that runs there."""

    rank: int
    address: str
    interface: str
    host: str
    prefix: list[str]
    process: subprocess.Popen | None = None
    log: Path = Path()
    starts: int = 0

    @property
    def running(self) -> subprocess.Popen:
        if self.process is None:
            raise RuntimeError(f"{self.host} was not started")
        return self.process

    def train(self, work: Path, master: str, port: int, *arguments: str, **variables: str) -> None:
        """Start train.sh as a user does."""
        place = {
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "LOCAL_ADDR": self.address,
            "NODE_RANK": str(self.rank),
        }
        self.start("train.sh", work, *arguments, PYTHON=sys.executable, **place, **variables)

    def start(self, script: str, work: Path, *arguments: str, **variables: str) -> None:
        """Start a script of examples/launch; its output goes to `log`."""
        self.log = work / f"{self.host}_{self.rank}.{self.starts}.log"
        self.starts += 1
        own = {
            "GLOO_SOCKET_IFNAME": self.interface,
            "LOG_DIR": str(work / "logs"),
            "OMP_NUM_THREADS": "1",
        }
        env = os.environ | own | variables
        command = [*self.prefix, "bash", str(ROOT / "examples/launch" / script), *arguments]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout: float) -> int:
        """Exit status.

        Raises AssertionError with the output when it takes longer than `timeout` seconds.
        """
        try:
            return self.running.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.host} is still running after {timeout:.0f} s:\n{self.text()}"
            ) from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def cut_off(self) -> None:
        """Disable its network, without closing connections."""
        assert self.prefix
        run(*self.prefix, "ip", "link", "set", self.interface, "down")

    def kill(self) -> None:
        """SIGKILL every process there, like a node that loses power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.running.pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.running.wait()


@contextlib.contextmanager
def make_nodes(count: int) -> Iterator[list[Node]]:
    """Nodes with addresses in ascending order; at the end their processes are killed."""
    names = [f"mrl{os.getpid()}n{rank}" for rank in range(count)]
    with contextlib.ExitStack() as stack:
        try:
            nodes = [in_namespace(rank, name, names[0], stack) for rank, name in enumerate(names)]
        except (OSError, subprocess.CalledProcessError):
            nodes = [
                Node(rank, f"127.0.0.{rank + 2}", "lo", f"loopback{rank}", [])
                for rank in range(count)
            ]
        try:
            yield nodes
        finally:
            for node in nodes:
                if node.process is not None:
                    node.kill()


def in_namespace(rank: int, name: str, first: str, stack: contextlib.ExitStack) -> Node:
    """A namespace joined to the bridge in the first node's namespace."""
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
        run(
            *here,
            "link",
            "add",
            "eth",
            "type",
            "veth",
            "peer",
            "name",
            f"port{rank}",
            "netns",
            first,
        )
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
