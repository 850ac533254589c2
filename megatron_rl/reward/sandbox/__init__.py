"""Runs Python that a model has written: no network, no files beside an empty folder of its own,
and limits of time, memory, processes and output.

    box.py        Box: starts programs within the walls of bubblewrap, or of our own launcher
    root.py       the files that they see
    workspace.py  Workspace: a shell and an editor for an episode
    programs/     what runs within the walls; it imports the standard library alone
"""
