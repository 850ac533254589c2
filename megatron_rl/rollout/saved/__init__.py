"""Rollouts in the files of a run, written and read.

recorded_rollouts  the lines of rollouts, one per sequence
rollout_tensors    the tensor files beside it (rollout.save_tensors)
rollout_recorder   writes both for the groups of a step
saved_steps        reads both: training without servers (--from-rollouts)
saved_config       checks that the saved run fits this one
"""
