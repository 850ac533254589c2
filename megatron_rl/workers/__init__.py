"""Processes that run users' code, reward functions and environments, apart from the trainer.

    the trainer's side          the worker's side
    worker_process.py           serving.py                  calls and answers, over one socket
    forks.py                    serving.py serve_forks      a process that forks a worker at a time
                 protocol.py                                messages of both
                                program.py                  a program, run in each fork

A worker leads a session of its own, so that killing its process group also kills its children.
Workers load only the standard library and the user's code: they start fast and stay small.
"""
