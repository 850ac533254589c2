"""R(x, y): scores responses in worker processes, so that one that hangs or crashes does not harm
the run.

What a reward function imports: `from megatron_rl.reward import Episode, LabelError, Score`.
"""

from megatron_rl.reward.failures import LabelError
from megatron_rl.reward.scored_response import Episode, EpisodeTurn, Score

__all__ = ["Episode", "EpisodeTurn", "LabelError", "Score"]
