"""Count what is left of the episodes of examples/coding_agent, with a model that follows a script.

    python -m benchmarks.coding_episodes [--episodes 1000] [--mini .venv-mini/bin/python]

Episodes run as in training: the rollout client, sessions, tools in the sandbox and the tests of the
repository; a server with fixed answers, in a process of its own, takes the model's place.  One in
eight leaves processes in the background and writes much, one tries paths outside, one kills all
that it can, one of a hundred runs into the time limit.  There are 200 repositories, and what the
tests say of a module is kept, as in training.  Temporary files go to a folder of the run.

Memory is that of the process; the first episodes load code and fill caches.  CPU is that of the
process and of those it has waited for, without what ran in the sandbox.  --mini: the same with
mini-swe-agent, of that environment, forked for each episode from a process that stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from examples.coding_agent.repositories import PATH, Repository, repositories
from megatron_rl.records import Prompt
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import TOKENIZER, VERSION, chat_sample, client_of

STEP, CONCURRENCY = 100, 8
SLOW_EVERY, REPOSITORIES = 100, 200
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--mini", metavar="PYTHON")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = os.environ["TMPDIR"] = folder
            measure(ours.recv(), server.pid, Path(folder), args.episodes, args.mini)
    finally:
        server.kill()
        server.join()


def measure(url: str, server: int | None, folder: Path, episodes: int, mini: str | None) -> None:
    program = "examples.coding_agent.mini_swe"
    command = (mini or "", f"{program.replace('.', '/')}.py")
    agent: dict[str, Any] = {"function": "examples.coding_agent.agent:rollout"}
    if mini:
        agent = {"command": command, "preload": (program,)}
    client = client_of(SimpleNamespace(url=url), 14_000, concurrency=CONCURRENCY, **agent)
    columns = "episodes | resident memory, MiB | open files | processes | threads | temporary files"
    print(f"| {columns} |\n|{'---|' * 6}")
    rewards: Counter[float] = Counter()
    done, started, cpu = 0, time.monotonic(), cpu_seconds()
    while done < episodes:
        chosen = range(done, min(done + STEP, episodes))
        prompts = [
            Prompt(str(i), task := repositories()[i].task, tuple(TOKENIZER.encode(task)), str(i))
            for i in (number % REPOSITORIES for number in chosen)
        ]
        groups = client.generate(
            prompts,
            1,
            policy_version=VERSION,
            temperature=1.0,
            max_tokens=12_000,
            stop_token_ids=(),
        )
        rewards.update(group.rollouts[0].episode.reward for group in groups)
        done += len(prompts)
        print(f"| {done} | {' | '.join(left_behind(server, folder))} |", flush=True)
    if client.episodes.processes is not None:
        client.episodes.processes.close()
    seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
    shares = ", ".join(f"{reward:g}: {count}" for reward, count in sorted(rewards.items()))
    print(f"\nepisodes of each reward: {shares}; CPU of an episode {cpu / done:.2f} s,")
    print(f"clock {seconds / done:.2f} s with {CONCURRENCY} at a time")


def left_behind(server: int | None, folder: Path) -> list[str]:
    gc.collect()
    process = psutil.Process()
    others = [child for child in process.children(recursive=True) if child.pid != server]
    helpers = [child for child in others if "resource_tracker" in " ".join(child.cmdline())]
    return [
        f"{process.memory_info().rss / 2**20:.0f}",
        str(process.num_fds()),
        str(len(others) - len(helpers)),
        str(process.num_threads()),
        str(len(list(folder.iterdir()))),
    ]


def cpu_seconds() -> float:
    """Return the CPU of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def serve(connection: Connection) -> None:
    """Answer for the model, until killed."""
    with FakeServer("ok", source=scripted) as server:
        connection.send(server.url)
        while True:
            time.sleep(1)
            server.requests.clear()


def scripted(body: dict, prompt: list[int], sample_id: str) -> dict:
    return chat_sample(body, prompt, sample_id, reply)


def reply(conversation: str) -> str:
    """Return the model's turn: up to two calls, then the end."""
    number = next(i for i, r in enumerate(repositories()) if r.task in conversation)
    turn = conversation.count("<|im_start|>assistant") - 1
    calls = script(number, repositories()[number])
    is_mini = "You mend code." in conversation
    if turn >= len(calls) and not is_mini:
        return "Done."
    name, arguments = calls[turn] if turn < len(calls) else ("shell", {"command": SUBMIT})
    if is_mini:
        edit = "sed -i 's/{old}/{new}/' {path}".format(**arguments) if name == "replace" else ""
        name, arguments = "bash", {"command": edit or arguments["command"]}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(number: int, repository: Repository) -> list[tuple[str, dict[str, str]]]:
    """Return the calls of an episode."""
    edit = {"path": PATH, "old": repository.wrong, "new": repository.right}
    fix = ("replace", edit)

    def shell(command: str) -> tuple[str, dict[str, str]]:
        return "shell", {"command": command}

    if number % SLOW_EVERY == 7:
        return [fix, shell("while true; do :; done")]
    match number % 8:
        case 0:
            return [("replace", edit | {"new": repository.others[0]}), shell("python3 test.py")]
        case 1:
            return [fix, shell("sleep 1000 & setsid sleep 1000 & yes | head -c 3000000")]
        case 2:
            return [("replace", edit | {"path": "../etc/passwd"}), shell("ln -s / x; ls x/home")]
        case 3:
            return [fix, shell("kill -9 -1; kill -9 $PPID")]
        case _:
            return [shell("python3 test.py"), fix]


if __name__ == "__main__":
    main()
