"""Reward functions that misbehave, for test_pool.py."""

import os
import signal
import subprocess
import sys
import threading
import time

from megatron_rl.reward.failures import LabelError

LEFT_RUNNING = (
    # the variable that says how long a child of "spawn" sleeps: finds it in the process table
    "SECONDS_OF_THE_CHILD"
)


def by_response(prompt, response, label):
    """Do what the response names."""
    response = response.strip()
    if response == "hang":
        time.sleep(600)
    if response == "spin":
        while True:
            pass
    if response == "raise":
        raise RuntimeError("on purpose")
    if response == "label":
        raise LabelError("on purpose")
    if response == "memory":
        raise MemoryError("on purpose")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(9)
    if response == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if response == "stop later":  # before it reads the next item
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    if response == "spawn and die":
        subprocess.Popen(["sleep", os.environ[LEFT_RUNNING]])
        os._exit(9)
    if response == "spawn":
        subprocess.Popen(["sleep", os.environ[LEFT_RUNNING]])
        time.sleep(600)
    if response == "nan":
        return float("nan")
    if response == "none":
        return None
    if response == "print":
        print('{"score": 77}', flush=True)
    if response == "flood":
        for _ in range(1000):
            print("x" * 100_000)
    if response.startswith("env "):
        return float(response.removeprefix("env ") in os.environ)
    return float(response == label)


def allocating(prompt: str, response: str, label: str) -> float:
    """1 where as many bytes as the response says can be had."""
    return float(len(bytearray(int(response))) == int(response))
