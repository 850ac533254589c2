"""Rollouts: SGLang servers, the client that samples from them, and what is saved of it.

scheduler     decides what is sampled, and which groups a step trains on
inference     the servers as the job uses them; generation_task samples on a thread
group         one prompt's group and its states; group_files, the same in a checkpoint
selection     which sampled groups a step keeps, agreed by all ranks
scoring       texts and rewards of sampled groups
missing_routes  tokens for which a server sent no experts
standalone    servers of one checkpoint, for evaluation outside a run
client/ server/ agents/ saved/
"""
