"""Small tokenizers: of the words w0 ..

w63, where token i is wi; and of bytes or characters with the tokens of a chat format.
"""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.faults.samples import SPEC


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(SPEC.vocab_size)}
    core = Tokenizer(WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", eos_token="w1")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Five words with their spaces, and the decoder of Mixtral's tokenizer.json."""
    spaced = [f"\u2581{word}" for word in ("The", "capital", "is", "Paris", "and")]
    words = ["<unk>", "</s>", *spaced]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Metaspace(prepend_scheme="first")
    core.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


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
