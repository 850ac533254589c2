"""Why a response could not be scored.  Each kind is counted as reward/KIND_total; what the response gets is reward.on_error."""

from __future__ import annotations

KINDS = {
    "timeouts": "not scored within reward.timeout_seconds",
    "crashes": "the worker process died",
    "memory": "the worker ran out of its memory",
    "bad_labels": "the label is none that the function understands: the data's fault",
    "invalid": "the function returned no finite number",
    "errors": "the function raised",
}


class LabelError(ValueError):
    """Raise it from a reward function when the label, not the response, is what cannot be understood."""
