"""Trackers, to which metrics are sent: TensorBoard, W&B, MLflow, trackio, or a class of the user
(docs/guides/look_at_a_run.md).
"""

from megatron_rl.metrics.trackers.tracker import Row, TrackedRun, Tracker

__all__ = ["Row", "TrackedRun", "Tracker"]
