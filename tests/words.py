"""A tokenizer of the words w0 .. w63: token i is wi."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.faults.samples import SPEC


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(SPEC.vocab_size)}
    core = Tokenizer(WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", eos_token="w1")
