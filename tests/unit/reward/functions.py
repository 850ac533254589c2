"""Reward functions that misbehave, for test_pool.py."""

import os
import sys
import time


def by_response(prompt, response, label):
    """Do what the response says."""
    if response == "hang":
        time.sleep(60)
    if response == "spin":
        while True:
            pass
    if response == "raise":
        raise RuntimeError("on purpose")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(9)
    if response == "nan":
        return float("nan")
    if response == "print":
        print('{"score": 77}', flush=True)
    return float(response == label)
