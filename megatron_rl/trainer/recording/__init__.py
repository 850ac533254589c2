"""Files that the trainer writes beside its metrics, in a thread.

    events_and_files  events.jsonl, and the thread that writes the files of this folder
    token_recorder    collects what the trainer knows about every sampled token
    token_files       the files in trained/, which hold that
    saved_batches     mini-batches that look wrong, for megatron-rl replay-batch

The servers' half, the files in rollouts/, is in rollout/saved.
"""
