"""Random conversations with a real SGLang server (python -m tests.conversations.served)."""

import pytest

from tests.conversations.served import run
from tests.tiny import random_checkpoint
from tests.words import qwen_tokenizer


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_learned_was_read_and_is_what_transformers_computes(tmp_path):
    tokenizer = qwen_tokenizer()
    random_checkpoint(tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained(tmp_path / "model")
    counts, wrong = run(tmp_path / "model", num=12, seed=3)
    assert not wrong
    assert counts["turns that were read"] > 12 and counts["rows of experts compared"] > 500
