"""The text of each token, from the tokenizer of a run.

A token of a byte-level tokenizer may be a part of a UTF-8 character, so it stands for bytes, not
for letters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer


class Pieces:
    """The bytes of each token id.

    Raises ValueError, which names the folder, if it has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        model = json.loads(self.tokenizer.to_str())
        parts = {
            part.get("type")
            for key in ("decoder", "pre_tokenizer")
            for part in flat_pieces(model.get(key))
        }
        self.is_byte_level = "ByteLevel" in parts
        # SentencePiece writes a space as U+2581
        decoder = json.dumps(model.get("decoder"))
        self.has_marks = bool(parts & {"Metaspace", "ByteFallback"}) or '"\\u2581"' in decoder
        self.added = {token["id"]: token["content"] for token in model.get("added_tokens", [])}

    def piece(self, token: int) -> bytes | None:
        """Return the bytes that the token adds to a text; None for an id outside the vocabulary."""
        if token in self.added:
            return self.added[token].encode()
        text = self.tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return None
        if self.is_byte_level and set(text) <= byte_of_letter().keys():
            return bytes(byte_of_letter()[letter] for letter in text)
        if self.has_marks and len(text) == 6 and text.startswith("<0x"):  # ByteFallback: <0xE4>
            return bytes.fromhex(text[3:5])
        return (text.replace("\u2581", " ") if self.has_marks else text).encode()


def flat_pieces(part: dict | None) -> list[dict]:
    """Return a part of a tokenizer.json and all parts in it."""
    if not part:
        return []
    inner = [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return [part, *(piece for child in inner for piece in flat_pieces(child))]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a tokenizer from local files."""
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path))
        if not (folder / "tokenizer_config.json").is_file():
            raise ValueError("no tokenizer.json or tokenizer_config.json")
        # the import takes seconds: only for a tokenizer without tokenizer.json
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    # `tokenizers` raises nothing more specific; the page then shows token ids, and the reason
    except Exception as error:
        raise ValueError(f"{folder}: no tokenizer that can be read: {error}") from error


@lru_cache
def byte_of_letter() -> dict[str, int]:
    """Return the letters that stand for bytes in byte-level vocabularies (GPT-2): printable bytes
    stand for themselves, the others have letters from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def shown_tokens(ids: Sequence[int], pieces: Pieces | None) -> list[dict[str, object]]:
    """Return [{"text", "id"}], with "bytes" if the token alone is not UTF-8.

    Without a tokenizer the text is <ID>.
    """
    return [
        {"id": token, **shown_text(token, pieces.piece(token) if pieces else None)} for token in ids
    ]


def shown_text(token: int, piece: bytes | None) -> dict[str, object]:
    if piece is None:
        return {"text": f"<{token}>"}
    try:
        return {"text": piece.decode()}
    except UnicodeDecodeError:
        return {"text": "".join(f"\\x{byte:02x}" for byte in piece), "bytes": piece.hex(" ")}
