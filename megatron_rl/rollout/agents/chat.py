"""Messages <-> tokens in a model's own chat format, by the `renderers` library: sampled tokens are kept as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from renderers import Renderer

NOT_NAMED = ("auto", "default", "custom")
"""Names that guess the format: a wrong guess trains on text that the model never sees when it is served."""

Message = Mapping[str, object]
"""E.g. {"role": "tool", "content": "4"}."""


class Chat:
    """agent.renderer with the model's tokenizer.  Raises ValueError, naming the key, where it does not know the format."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        from renderers import create_renderer  # here: it takes a second
        from renderers.configs import config_from_name

        self.name = name
        try:
            if name in NOT_NAMED:
                raise ValueError("must be the name of one format")
            # many templates drop the thinking of earlier turns, but a sequence cannot lose tokens that were sampled
            config = type(config_from_name(name))(thinking_retention="all")
            self._renderer: Renderer = create_renderer(tokenizer, config)
        except (ValueError, KeyError, AttributeError, AssertionError) as error:  # renderers asserts that tokens exist
            raise ValueError(
                f"agent.renderer = {name!r}: {error}; it must be the format of the model at model.path"
            ) from error

    @property
    def stop_token_ids(self) -> list[int]:
        """What ends a turn."""
        return list(self._renderer.get_stop_token_ids())

    def extend(self, prompt: Sequence[int], completion: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens that follow `prompt` and the turn `completion`: `messages`, and what opens the next turn.

        Raises ValueError where the format would change what was sampled.
        """
        given = [*prompt, *completion]
        found = self._renderer.bridge_to_next_turn(list(prompt), list(completion), [dict(each) for each in messages])
        if found is None or list(found.token_ids[: len(given)]) != given:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot continue the {len(given)} tokens so far with "
                f"{[message.get('role') for message in messages]} without changing sampled tokens"
            )
        return list(found.token_ids[len(given) :])
