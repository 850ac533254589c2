"""The language of the task "chat": Qwen3's chat format, in byte pairs that can write every text.

    <|im_start|>user
    What is 37 * 48?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "calculate", "arguments": {"a": 37, "operator": "*", "b": 48}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    1776.0
    </tool_response><|im_end|>
    <|im_start|>assistant
    1776<|im_end|>

The special tokens are those of Qwen3, so that its renderer, its parsers of tool calls and a server
read the model without a setting.  Digits and line feeds are tokens of their own, so that a number
has as many tokens as digits, and tokens of a turn do not depend on what was written before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from itertools import zip_longest
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl_tools.tiny_tasks import Example, Examples
from megatron_rl_tools.tiny_text import Data, Language, as_tensors

END, START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Tokens that decoding keeps, as in Qwen3."""
TEMPLATE = Path(__file__).with_name("tiny_chat.jinja")
VOCABULARY_SIZE = 1024
"""With the 256 bytes and the special tokens: enough that the fixed parts of a prompt with a tool
are a few tokens."""
MAX_LENGTH = 512
NOWHERE = "\0"
"""A text that no message has."""
KNOWN_TEXTS = 4096
NUM_TEXTS = 600
"""Transcripts from which the byte pairs are counted."""


def chat(examples: Examples) -> Language:
    """Make the language; its byte pairs are those that are frequent in `examples`."""
    tokenizer = make_chat_tokenizer(examples)
    return Language(tokenizer, partial(encode_chat, tokenizer))


def make_chat_tokenizer(examples: Examples) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len((END, START, TURN_END, *MARKS)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(plain_texts(examples[:: len(examples) // NUM_TEXTS or 1]), trainer)
    core.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (END, START, TURN_END)]
    )
    core.add_tokens([AddedToken(token, normalized=False) for token in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=END,
        eos_token=TURN_END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template()
    return tokenizer


def plain_texts(examples: Examples) -> Iterator[str]:
    """Yield the texts between special tokens, which alone have byte pairs."""
    for example in examples:
        text = "".join(part for part, _ in parts_of(example))
        for token in (END, START, TURN_END, *MARKS):
            text = text.replace(token, NOWHERE)
        yield from filter(None, text.split(NOWHERE))


def encode_chat(tokenizer: PreTrainedTokenizerFast, examples: Examples, free: str = "") -> Data:
    """Encode the transcripts: the conversation up to the first turn, turns with their end, what
    comes between them, pads.

    free: characters that are not judged.
    """
    core = tokenizer.backend_tokenizer  # half of the time of `tokenizer.encode`
    encode = lru_cache(KNOWN_TEXTS)(lambda text: core.encode(text, add_special_tokens=False).ids)
    rows = [
        [(token, is_models) for text, is_models in parts_of(example) for token in encode(text)]
        for example in examples
    ]
    return as_tensors(rows, tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids(list(free)))


def parts_of(example: Example) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a conversation's text, each with whether the model writes it.

    Parts end at a line feed or at a special token, so that each has the tokens that it has in the
    whole text.
    """
    before, after = around("user", example.system, *map(json.dumps, example.tools))
    yield from ((before, False), (example.prompt, False), (after, False))
    before, after = around(example.answered_by)
    for turn, answer in zip_longest(example.turns, example.answers):
        yield turn + TURN_END, True
        if answer is not None:
            yield from (("\n", False), (before, False), (answer, False), (after, False))


@cache
def around(role: str, system: str = "", *tools: str) -> tuple[str, str]:
    """Return the text before and after the content of a message: what opens the conversation, and
    what opens the model's turn.
    """
    messages = [{"role": role, "content": NOWHERE}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=[json.loads(tool) for tool in tools] or None,
        chat_template=template(),
        add_generation_prompt=True,
    )
    before, after = text.split(NOWHERE)
    return before, after


@cache
def template() -> str:
    return TEMPLATE.read_text()
