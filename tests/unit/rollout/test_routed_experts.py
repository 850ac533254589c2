"""Decoding is exact on honest payloads and refuses every malformed one that structure can show."""

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout import routed_experts
from megatron_rl.rollout.routed_experts import (
    RoutedExpertsError,
    decode_routed_experts,
    load_routed_experts,
    save_routed_experts,
)

ROWS, LAYERS, K, EXPERTS = 40, 6, 4, 32


def honest(rows=ROWS, layers=LAYERS, top_k=K, experts=EXPERTS, seed=0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, layers, experts))
    return scores.argsort(-1)[..., :top_k].astype("<i4")


def encode(ids: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()


def decode(payload, rows=ROWS, layers=LAYERS, top_k=K, experts=EXPERTS, moe_layers=None) -> np.ndarray:
    return decode_routed_experts(
        payload,
        num_rows=rows,
        num_layers=layers,
        moe_layers=range(layers) if moe_layers is None else moe_layers,
        top_k=top_k,
        num_experts=experts,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 30),
    layers=st.integers(1, 5),
    top_k=st.integers(1, 5),
    experts=st.sampled_from([5, 128, 256, 257, 512]),
    block_bytes=st.sampled_from([1, 100, 1000, 10**6]),
    seed=st.integers(0, 10**6),
    as_bytes=st.booleans(),
)
def test_decodes_exactly_whatever_the_shape_and_block_size(rows, layers, top_k, experts, block_bytes, seed, as_bytes):
    ids = honest(rows, layers, top_k, experts, seed)
    payload = encode(ids).encode() if as_bytes else encode(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
        decoded = decode(payload, rows, layers, top_k, experts)
    assert decoded.dtype == (np.uint8 if experts <= 256 else np.int16)
    assert decoded.shape == ids.shape and (decoded == ids).all()


def test_dense_layers_are_left_out_and_may_hold_anything():
    ids = honest()
    ids[:, 0] = 0
    ids[:, 3] = 10**9
    assert (decode(encode(ids), moe_layers=[1, 2, 4, 5]) == ids[:, [1, 2, 4, 5]]).all()


def edited(edit) -> str:
    return encode(edit(honest()))


def set_at(index, value):
    def edit(ids):
        ids = ids.copy()
        ids[index] = value
        return ids

    return edit


def copy_column(ids):
    ids = ids.copy()
    ids[17, 2, 3] = ids[17, 2, 0]
    return ids


MALFORMED = {
    "id = E": ("out_of_range", edited(set_at((5, 1, 2), EXPERTS))),
    "id 999": ("out_of_range", edited(set_at((5, 1, 2), 999))),
    "id -1": ("out_of_range", edited(set_at((39, 5, 3), -1))),
    "id that wraps to a legal int16": ("out_of_range", edited(set_at((5, 1, 2), 65539))),
    "id that wraps to a legal uint8": ("out_of_range", edited(set_at((5, 1, 2), 259))),
    "duplicate": ("duplicate", edited(copy_column)),
    "all-equal row": ("duplicate", edited(set_at((7, 4), 3))),
    "zero row": ("duplicate", edited(set_at((7, 4), 0))),
    "zero tail": ("duplicate", edited(set_at(slice(30, None), 0))),
    "zero layer": ("duplicate", edited(set_at((slice(None), 2), 0))),
    "everything zero": ("duplicate", edited(np.zeros_like)),
    "a row short": ("wrong_size", edited(lambda ids: ids[:-1])),
    "a row long": ("wrong_size", edited(lambda ids: np.concatenate([ids, ids[:1]]))),
    "half the layers": ("wrong_size", edited(lambda ids: ids[:, :3])),
    "another top-k": ("wrong_size", edited(lambda ids: ids[..., :3])),
    "int64": ("wrong_size", edited(lambda ids: ids.astype("<i8"))),
    "int16": ("wrong_size", edited(lambda ids: ids.astype("<i2"))),
    "uint8": ("wrong_size", edited(lambda ids: ids.astype("u1"))),
    "float32": ("out_of_range", edited(lambda ids: ids.astype("<f4"))),
    "big-endian": ("out_of_range", edited(lambda ids: ids.astype(">i4"))),
    "empty": ("wrong_size", ""),
    "truncated text": ("wrong_size", edited(lambda ids: ids)[:-8]),
    "a newline in the text": ("wrong_size", edited(lambda ids: ids) + "\n"),
    "a space for a character": ("not_base64", " " + edited(lambda ids: ids)[1:]),
    "url-safe alphabet": ("not_base64", "-_" + edited(lambda ids: ids)[2:]),
    "padding in the middle": ("not_base64", "AA==" + edited(lambda ids: ids)[4:]),
    "not ASCII": ("not_base64", "\u00e9" + edited(lambda ids: ids)[1:]),
    "text": ("wrong_size", "not base64!"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("block_bytes", [1, 10**6])
def test_malformed_payloads_are_refused(case, block_bytes, monkeypatch):
    monkeypatch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
    reason, payload = MALFORMED[case]
    with pytest.raises(RoutedExpertsError) as caught:
        decode(payload)
    assert caught.value.reason == reason


def test_an_error_names_layer_row_and_value(monkeypatch):
    monkeypatch.setattr(routed_experts, "BLOCK_BYTES", 1000)
    with pytest.raises(RoutedExpertsError) as caught:
        decode(MALFORMED["id 999"][1], moe_layers=[1, 4])
    assert (caught.value.layer, caught.value.row, caught.value.value) == (1, 5, 999)
    assert "0 <= id < 32" in str(caught.value)
    with pytest.raises(RoutedExpertsError) as caught:
        decode(MALFORMED["duplicate"][1])
    assert (caught.value.layer, caught.value.row) == (2, 17)
    assert caught.value.value == honest()[17, 2, 0]


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, ROWS * LAYERS * K * 4 * 4 // 3 - 1), character=st.characters(codec="latin-1"))
def test_one_changed_character_is_never_silently_an_illegal_id(position, character):
    """Whatever one character becomes, the result is refused or is in range, distinct and what strict decoding says."""
    text = encode(honest())
    changed = text[:position] + character + text[position + 1 :]
    try:
        ids = decode(changed)
    except RoutedExpertsError:
        return
    reference = np.frombuffer(base64.b64decode(changed, validate=True), "<i4").reshape(ids.shape)
    assert (ids == reference).all() and reference.min() >= 0 and reference.max() < EXPERTS
    assert (np.diff(np.sort(ids, axis=-1).astype(int), axis=-1) > 0).all()


def test_saved_routes_load_exactly(tmp_path):
    routes = {"a/0": decode(encode(honest())), "b/1": np.arange(6, dtype=np.int16).reshape(1, 2, 3)[:, ::-1]}
    save_routed_experts(tmp_path / "routes.safetensors", routes)
    loaded = load_routed_experts(tmp_path / "routes.safetensors")
    assert set(loaded) == set(routes)
    for name, ids in routes.items():
        assert loaded[name].dtype == ids.dtype and np.array_equal(loaded[name], ids)
