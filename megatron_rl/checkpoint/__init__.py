"""Checkpoints of a whole run: what is in one, how it is written so that it is whole or absent, and how it is judged and loaded.

checkpointer  save (in the background, if asked), load, and what to offer when a checkpoint is damaged; collective
state         model, optimizer and random generators -> what megatron-core's dist_checkpointing shards, and back
writer        core's torch_dist format, written by threads of this process, errors reported to every rank
manifest      digests of every file
folder        names, atomic commit, the `latest` pointer, retention
lock          one run at a time in a run directory
changes       which settings may differ from the checkpoint's
signals       SIGTERM and SIGUSR1: save and exit with a code that says: start me again
"""
