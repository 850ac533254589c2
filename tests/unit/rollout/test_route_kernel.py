"""The compiled decoder accepts exactly what NumPy's accepts: same ids, same gaps, same words of refusal; and it does the work."""

import base64
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout.client import routed_experts
from megatron_rl.rollout.client.routed_experts import RoutedExpertsError, clean_decoder, decode_routed_experts

SHAPES = [  # rows, layers, first MoE layer, K, E; every unit that ids are stored in, whole steps and rests
    (50, 6, 0, 8, 128),
    (50, 3, 1, 8, 256),
    (49, 4, 0, 2, 8),
    (97, 5, 2, 4, 64),
    (30, 3, 0, 6, 160),
    (73, 2, 0, 1, 200),
    (48, 3, 1, 5, 40),
]
ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def decode(payload, rows, layers, first, top_k, experts):
    """What comes out, as plain values; or the words of refusal."""
    try:
        ids, missing = decode_routed_experts(
            payload, num_rows=rows, num_layers=layers, moe_layers=range(first, layers), top_k=top_k, num_experts=experts
        )
    except RoutedExpertsError as error:
        return str(error)
    assert ids.transpose(1, 0, 2).flags.c_contiguous and ids.dtype == np.uint8
    return ids.tolist(), missing if missing is None else missing.tolist()


def with_numpy(payload, *shape):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_experts, "clean_decoder", lambda: None)
        return decode(payload, *shape)


def honest(rng, rows, layers, first, top_k, experts):
    ids = rng.random((rows, layers, experts)).argsort(-1)[..., :top_k].astype("<i4")
    ids[:, :first] = 0  # SGLang never writes dense layers
    return ids


def damaged_ids(rng, ids, experts):
    row, layer, column, other = (rng.integers(size) for size in (*ids.shape, ids.shape[2]))
    values = (-1, 0, experts - 1, experts, 255, 256, 511, 65536, 2**31 - 1, ids[row, layer, other])
    place = [(row, layer, column), (row, layer), row, (slice(None), layer)][rng.choice(4, p=[0.7, 0.1, 0.15, 0.05])]
    ids[place] = values[rng.integers(len(values))]


def damaged_text(rng, text):
    """One to three characters others: of the alphabet, one bit away, or any byte."""
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(len(text))
        text[at] = (ALPHABET[rng.integers(64)], text[at] ^ 1 << rng.integers(8), rng.integers(256))[rng.integers(3)]


@pytest.mark.parametrize("block_bytes", [1, 10**6])
def test_thousands_of_mutations_are_judged_as_by_numpy(block_bytes, monkeypatch):
    monkeypatch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
    refused = accepted = 0
    for shape in SHAPES:
        rng = np.random.default_rng(sum(shape))
        for mutation in range(250):
            ids = honest(rng, *shape)
            for _ in range(rng.integers(0, 3)):
                damaged_ids(rng, ids, shape[-1])
            text = bytearray(base64.b64encode(ids.tobytes()))
            if mutation % 2:
                damaged_text(rng, text)
            found = decode(memoryview(text).toreadonly(), *shape)
            assert found == with_numpy(bytes(text), *shape), (shape, mutation)
            refused, accepted = refused + isinstance(found, str), accepted + isinstance(found, tuple)
    assert min(refused, accepted) > 300


@pytest.mark.parametrize("top", [255, 199, 6])
def test_every_character_at_every_place(top):
    """One step is clean if and only if strict base64 decoding gives ids of at most `top`: all 128 places x 256 bytes."""
    rng = np.random.default_rng(top)
    out = np.zeros((1, 24, 1), np.uint8)
    clean = 0
    for at in range(128):
        text = bytearray(base64.b64encode(rng.integers(0, top + 1, 24).astype("<i4").tobytes()))
        for character in range(256):
            text[at] = character
            try:
                ids = np.frombuffer(base64.b64decode(bytes(text), validate=True), "<i4")
            except ValueError:
                ids = np.full(24, -1)
            is_clean = len(ids) == 24 and ids.min() >= 0 and ids.max() <= top
            assert clean_decoder()(bytes(text), out, 0, 24, 1, slice(0, 1), top) == 24 * is_clean, (at, character)
            assert not is_clean or (out[0, :, 0] == ids).all()
            clean += is_clean
    assert clean > 128


def test_the_compiled_decoder_takes_all_whole_groups_of_rows():
    """So that the comparison above compares something; also of a str, and not one with characters beyond ASCII."""
    rng = np.random.default_rng(0)
    for rows, layers, first, top_k, experts in SHAPES:
        ids = honest(rng, rows, layers, first, top_k, experts)
        text = base64.b64encode(ids.tobytes())
        out = np.zeros((layers - first, rows + 3, top_k), np.uint8)
        for payload in (text, text.decode()):
            arguments = payload, out, 2, rows, layers, slice(first, layers), experts - 1
            assert clean_decoder()(*arguments) == rows // 24 * 24
        done = rows // 24 * 24
        assert (out[:, 2 : done + 2].transpose(1, 0, 2) == ids[:done, first:]).all() and not out[:, done + 2 :].any()
        odd = "\u00e9" + text.decode()[1:]
        assert clean_decoder()(odd, out, 0, rows, layers, slice(first, layers), experts - 1) == 0


def test_without_numba_numpy_decodes_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "megatron_rl.rollout.client.route_kernel", None)  # its import fails
    clean_decoder.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            shape = SHAPES[0]
            ids = honest(np.random.default_rng(0), *shape)
            for _ in range(2):
                assert decode(base64.b64encode(ids.tobytes()), *shape) == (ids.tolist(), None)
        assert len(caplog.records) == 1 and "numba" in caplog.text
    finally:
        clean_decoder.cache_clear()


def test_compiled_code_is_kept_on_disk():
    """A rank that starts finds it: compiling takes seconds."""
    from megatron_rl.rollout.client import route_kernel

    assert clean_decoder() is not None
    route_kernel.decode_clean_rows(b"", np.empty((1, 0, 8), np.uint8), 0, 0, 1, slice(0, 1), 7)
    assert any(Path(route_kernel._decode.stats.cache_path).glob("route_kernel._decode-*.nbc"))


@pytest.mark.parametrize(("moe_layers", "top_k", "experts"), [((0, 1, 2), 8, 128), ((1, 2), 1, 8), ((0, 2), 3, 600)])
def test_warming_up_suits_any_model(moe_layers, top_k, experts):
    routed_experts.warm_up(routed_experts.ModelSpec(3, moe_layers, top_k, experts, 64))
