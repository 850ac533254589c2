"""A reward of a group: [reward] function = "examples.rewards.shortest_correct:shortest_correct".

The annotation list[Episode] makes it one: it is called with the responses to a prompt and returns a
result for each.
"""

from megatron_rl.reward import Episode, Score

BONUS = 0.2


def shortest_correct(group: list[Episode]) -> list[Score]:
    """1 for a right answer, and a bonus for the shortest of them.  Logs reward/is_right."""
    is_right = [episode.response.strip() == episode.label.strip() for episode in group]
    shortest = min(
        (episode.num_tokens for episode, right in zip(group, is_right, strict=True) if right),
        default=0,
    )
    return [
        Score(right * (1.0 + BONUS * (episode.num_tokens == shortest)), {"is_right": float(right)})
        for episode, right in zip(group, is_right, strict=True)
    ]
