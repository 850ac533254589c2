"""Checkpoints of a run: their content, how they are written completely or not at all, checked and
loaded.

checkpointer  save (in the background, if set), load, and the alternative to a damaged checkpoint;
              collective
save_policy   when the training loop saves, on signals, and what it resumes from
state         model, optimizer and random generators <-> what megatron-core's dist_checkpointing
              shards

              rank
manifest      digests of every file
folder        names, atomic commit, the `latest` pointer, retention
lock          one run at a time in a run directory
config_diff   which settings may differ from the checkpoint's
"""
