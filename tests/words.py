"""Small tokenizers: of the words w0 ..

w63, where token i is wi; and of bytes or characters with the tokens of a chat format.
"""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.faults.samples import SPEC


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(SPEC.vocab_size)}
    core = Tokenizer(WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", eos_token="w1")


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the tokens that Qwen3's format names."""
    core = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def small_qwen_tokenizer() -> PreTrainedTokenizerFast:
    """At most 64 tokens: those that Qwen3's format names, and characters; others are "?"."""
    letters = [*SPECIAL, *TAGS, *"?abcdefghijklmnopqrstuvwxyz0123456789 \n<>/_{}:,.[]=+"]
    core = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="?"))
    core.decoder = Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="?")
