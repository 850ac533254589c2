"""Checkpoints of a run: their content, how they are written completely or not at all, and loaded.

checkpointer       saves, in the background if that is set; collective
checkpoint_loader  checks every file and restores a run; names an undamaged checkpoint
save_policy        when the training loop saves, on signals, and what it resumes from
state              model, optimizer and random generators as megatron-core's sharded state
torch_dist/        core's format, written by threads of each rank and read without unpickling code
batches/           saved mini-batches, for `megatron-rl replay-batch`
all_ranks          what ranks exchange, so that all of them succeed or fail
manifest           digests of every file
folder             names, atomic commit, the `latest` pointer, retention
lock               one run at a time in a run directory
config_diff        which settings may differ from the checkpoint's
write_progress     how far the files are written
"""
